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
    [(SETTINGS, "path"), (SPLIT, "classes"), (METRICS, "train_seconds"), (STEPS, "loss")],
)
def test_an_edited_file_is_named_with_its_key(review_csv, tmp_path, file, key):
    path = write_run(tmp_path / "run", review_csv(), steps=1) / file
    content = json.loads(path.read_text())
    removed = {name: value for name, value in content.items() if name != key}
    for edited, problem in ((removed, f"KeyError: '{key}'"), (content | {key: None}, f"TypeError: {key} is None")):
        path.write_text(json.dumps(edited))
        with pytest.raises(UserError, match=rf"^{path}: damaged or incomplete.*{problem}$"):
            read_run(path.parent)


def test_predictions_of_fewer_rows_are_named(review_csv, tmp_path):
    path = write_run(tmp_path / "run", review_csv()) / PREDICTIONS
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))
    with pytest.raises(UserError, match=rf"^{path}: damaged .*: 13 rows, not the 15 of metrics.json$"):
        read_run(path.parent)


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
