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
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".log", ".json", ".md"}, "no CSV, no runs"
    starts = json.loads((tmp_path / "out" / "growth.json").read_text())["sections"]["growth"]
    assert list(starts) == ["90, cold", "90, warm"]
    for start in starts.values():
        assert start["seconds"] > 0
        assert len(start["MiB of each rank"]) == 2
        assert all(64 < peak < 2048 for peak in start["MiB of each rank"])
