"""A missing or damaged file of a run is one line that names it. tests/launched/test_paths.py reads what runs wrote."""

from __future__ import annotations

import json

import pytest
from helpers.run_folders import write_run

from app.common.errors import UserError
from app.runs.reader import read_run
from app.runs.schema import METRICS, PREDICTIONS, SETTINGS, SPLIT, STEPS


@pytest.mark.parametrize(
    ("file", "key"),
    [(SETTINGS, "path"), (SPLIT, "classes"), (METRICS, "train_seconds"), (STEPS, "loss"), (PREDICTIONS, None)],
)
def test_a_file_that_is_missing_damaged_or_edited_is_named(review_csv, tmp_path, file, key):
    run = write_run(tmp_path / "run", review_csv(), steps=1)
    content = (run / file).read_bytes()
    edits = dict.fromkeys((content[:20], b"\xff", b"[1]", b"null", b"3", b"NaN", b'"x"'), "")
    if key is None:
        edits[b"".join(content.splitlines(keepends=True)[:-2])] = "13 rows, not the 15 of metrics.json"
    else:
        values = json.loads(content)
        edits[json.dumps(values | {key: None}).encode()] = f"TypeError: {key} is None"
        del values[key]
        edits[json.dumps(values).encode()] = f"KeyError: '{key}'"
    for edited, problem in edits.items():
        (run / file).write_bytes(edited)
        with pytest.raises(UserError, match=rf"^{run / file}: damaged or incomplete.*{problem}$") as caught:
            read_run(run)
        assert "\n" not in str(caught.value)
    (run / file).unlink()
    with pytest.raises(UserError, match=rf"{file}: missing: the run has not finished"):
        read_run(run)
