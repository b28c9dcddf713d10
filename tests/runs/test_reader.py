"""A missing or damaged file of a run is one line that names it. tests/launched/test_paths.py reads what runs wrote."""

from __future__ import annotations

import pytest
from helpers.run_folders import write_run

from app.common.errors import UserError
from app.runs.reader import read_run
from app.runs.schema import METRICS, PREDICTIONS, SETTINGS, SPLIT, STEPS


@pytest.fixture
def run(review_csv, tmp_path):
    return write_run(tmp_path / "run", review_csv())


@pytest.mark.parametrize("file", [SETTINGS.name, SPLIT.name, METRICS.name, STEPS.name, PREDICTIONS])
def test_a_file_that_is_missing_or_cut_is_named(run, file):
    content = (run / file).read_bytes()
    (run / file).write_bytes(content[:20])
    with pytest.raises(UserError, match=rf"{file}: damaged or incomplete") as problem:
        read_run(run)
    assert "\n" not in str(problem.value)
    (run / file).unlink()
    with pytest.raises(UserError, match=rf"{file}: missing: the run has not finished"):
        read_run(run)


@pytest.mark.parametrize("content", ["[1]", "null", "3", "NaN", '"x"'])
def test_json_that_is_not_an_object_is_rejected(run, content):
    (run / SPLIT.name).write_text(content)
    with pytest.raises(UserError, match=r"split\.json: damaged"):
        read_run(run)
