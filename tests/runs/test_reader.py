"""A missing or damaged file of a run is one line that names it. tests/launched/test_paths.py reads what runs wrote."""

from __future__ import annotations

import pytest
from helpers.run_folders import write_run

from app.common.errors import UserError
from app.runs.reader import read_run
from app.runs.schema import METRICS, PREDICTIONS, SETTINGS, SPLIT, STEPS


@pytest.mark.parametrize("file", [SETTINGS.name, SPLIT.name, METRICS.name, STEPS.name, PREDICTIONS])
def test_a_file_that_is_missing_or_damaged_is_named(review_csv, tmp_path, file):
    run = write_run(tmp_path / "run", review_csv())
    cut = (run / file).read_bytes()[:20]
    for content in (cut, b"\xff", b"[1]", b"null", b"3", b"NaN", b'"x"'):
        (run / file).write_bytes(content)
        with pytest.raises(UserError, match=rf"^.*{file}: damaged or incomplete.*$") as problem:
            read_run(run)
        assert "\n" not in str(problem.value)
    (run / file).unlink()
    with pytest.raises(UserError, match=rf"{file}: missing: the run has not finished"):
        read_run(run)
