"""app.bench.growth, shortened: the ranks read through the cache, and the second job finds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.launched, pytest.mark.slow]


def test_a_cold_and_a_warm_start_are_measured(launch, review_csv, tmp_path: Path) -> None:
    csv = review_csv(50)
    done = launch("app.bench.growth", "--csv", csv, "--rows", 90, "--output_dir", tmp_path / "out")
    assert done.status == 0, done.err
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".log", ".json", ".html"}, "no CSV, no runs"
    starts = json.loads((tmp_path / "out" / "growth.json").read_text())["sections"]["growth"]["90"]
    cold, warm = starts["cold"], starts["warm"]
    phases = [*cold["phases"].values(), cold["first_step"]]
    assert phases == sorted(phases)
    assert len(phases) == 4
    assert warm["phases"] == {}
    assert warm["first_step"] > 0
    for start in (cold, warm):
        assert set(start["memory_before"]) == set(start["memory"]) == {"0", "1"}
        assert all(2**26 < before <= start["memory"][rank] < 2**31 for rank, before in start["memory_before"].items())
