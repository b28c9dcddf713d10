"""The speed benchmark with two ranks: recipes in jobs of their own, its tables and its files."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.launched, pytest.mark.slow]


# One of each program.
RECIPES = ("ddp_loop", "trainer_run", "tutorial", "trainer-defaults")


def test_recipes_are_timed_on_two_ranks(launch, review_csv, tmp_path):
    flags = ["--use_cpu", "--threads", 1, "--csv", review_csv(150), "--max_length", 16, "--train_batch_size", 8]
    flags += ["--steps", 2, "--rounds", 1, "--output_dir", "out", "--model", "4x312", "--precision", "bf16"]
    done = launch("app.bench.speed", *flags, ranks=0)
    assert done.status == 0, done.err
    for name in RECIPES:
        assert done.out.count(f"\n| {name} ") == 1
    content = json.loads((tmp_path / "out" / "speed.json").read_text())
    assert content["machine"]["command"].startswith("python -m app.bench.speed --use_cpu")
    measured = content["sections"]["speed"]
    for name in RECIPES:
        one = measured["rounds"][f"(0, '{name}')"]
        assert one["examples"] == 16, "2 steps of 8 rows, 4 of them on each rank"
        assert one["seconds"] > 0
        assert one["tokens"] <= one["padded_tokens"] <= 16 * 16
        assert 0 < measured["mfu"][name][0] < 1
    assert measured["rounds"]["(0, 'tutorial')"]["padded_tokens"] == 16 * 16
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"speed.json", "speed.md"}


def test_a_mistake_is_reported_before_anything_is_measured(launch, review_csv, tmp_path):
    flags = ["--use_cpu", "--threads", 1, "--csv", review_csv(60), "--output_dir", "out", "--model", "./absent"]
    done = launch("app.bench.speed", *flags, ranks=0)
    assert done.status == 2
    (line,) = done.error_lines
    assert line.startswith("error: --model ./absent: ")
    assert not (tmp_path / "out").exists()
