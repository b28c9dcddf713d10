"""Predictions by several processes."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.launched, pytest.mark.slow]
FLAGS = [
    "--max_length=32",
    "--max_steps=2",
    "--eval_strategy=no",
    "--save_strategy=no",
    "--use_cpu",
    "--output_dir=run",
]


def test_any_number_of_ranks_predicts_the_same_bytes(launch, review_csv, tmp_path):
    path = review_csv(400)
    done = launch("ddp_loop", f"--csv={path}", *FLAGS, "--eval_batch_size=8", "--use_cpu", "--logical_ranks=2", ranks=2)
    assert done.status == 0, done.err
    for ranks in (0, 4):
        done = launch("predict", "run", "--split=test", f"--output={ranks}.csv", "--use_cpu", ranks=ranks)
        assert done.status == 0, done.err
        assert (tmp_path / f"{ranks}.csv").read_bytes() == (tmp_path / "run" / "predictions.csv").read_bytes()
    mistake = launch("predict", "run", "好", "--use_cpu", ranks=2)
    assert mistake.status != 0
    (line,) = [line for line in mistake.err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: texts are predicted by one process")
