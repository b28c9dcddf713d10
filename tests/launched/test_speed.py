"""The speed benchmark with two ranks: every recipe in one job, its tables and its files."""

from __future__ import annotations

import json

import pytest

from app.bench.speed.measure import OWN
from app.flags import RECIPES

pytestmark = pytest.mark.launched


@pytest.mark.slow  # tests/bench/speed trains every recipe on one rank
def test_every_recipe_is_timed_on_two_ranks(launch, review_csv, tmp_path):
    flags = ["--use_cpu", "--threads", 1, "--csv", review_csv(150), "--max_length", 16, "--train_batch_size", 8]
    flags += ["--steps", 2, "--rounds", 1, "--output_dir", "out"]
    done = launch("app.bench.speed", *flags, ranks=2)
    assert done.status == 0, done.err
    assert "## tiny-bert, 2 ranks" in done.out
    for name in RECIPES:
        assert done.out.count(f"\n| {name} ") == 3, "speed, and ratios of wall time and of CPU time"
    content = json.loads((tmp_path / "out" / "speed.json").read_text())
    assert content["machine"]["ranks"] == "2 on 1 node(s)"
    assert content["machine"]["command"].startswith("python -m app.bench.speed --use_cpu")
    measured = content["models"]["tiny-bert"]
    assert list(measured) == list(RECIPES)
    for name, of_recipe in measured.items():
        (one,) = of_recipe["rounds"]
        assert one["examples"] == 16, "2 steps of 8 rows, 4 of them on each rank"
        assert one["seconds"] > 0
        assert of_recipe["mfu"] > 0  # its value, from a given peak, is tested in tests/bench/speed
        assert set(of_recipe["times_as_fast_as"]) == set(RECIPES) - {name}
    assert {measured[name]["rounds"][0]["tokens"] for name in OWN} == {measured[OWN[0]]["rounds"][0]["tokens"]}
    assert measured["tutorial"]["rounds"][0]["padded_tokens"] == 16 * 16
    page = (tmp_path / "out" / "speed.html").read_text()
    assert page.count("<svg") == 1
    assert "speed.json" in page
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["speed.html", "speed.json"]


@pytest.mark.slow
def test_a_mistake_in_the_last_model_is_reported_before_the_first_one_is_measured(launch, review_csv, tmp_path):
    flags = ["--use_cpu", "--threads", 1, "--csv", review_csv(60), "--output_dir", "out"]
    done = launch("app.bench.speed", *flags, "--models", "tiny-bert", "./absent")
    assert done.status == 2
    (line,) = done.error_lines
    assert line.startswith("error: --model ./absent: ")
    assert not (tmp_path / "out").exists()
