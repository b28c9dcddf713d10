"""The launcher of older tutorials, which passes `--local-rank` to each process."""

from __future__ import annotations

import json

import pytest
from helpers.jobs import SAMPLE_CSV, Job

pytestmark = [pytest.mark.launched, pytest.mark.slow]


def test_both_paths_train_identically_under_torch_distributed_launch(tmp_path):
    """With `--use-env`, the launcher passes no flag."""
    flags = ["--csv", SAMPLE_CSV, "--max_length", 32, "--max_steps", 2, "--eval_strategy", "no", "--use_cpu"]
    hashes = set()
    for path, launcher_flags in (("ddp_loop", []), ("trainer_run", ["--use-env"])):
        job = Job(path, *flags, "--output_dir", path, cwd=tmp_path, torchrun_flags=["--standalone", *launcher_flags])
        job.command[job.command.index("torch.distributed.run")] = "torch.distributed.launch"
        with job:
            done = job.finish()
        assert done.status == 0, done.err
        hashes.add(json.loads((tmp_path / path / "metrics.json").read_text())["hash"])
    assert len(hashes) == 1
