"""The hash of a run's results: every result changes it; the folder, times and descriptions do not."""

from __future__ import annotations

import hashlib
import json

import pytest
from helpers.run_folders import edit_json, edit_step, write_run

from app.runs.hashes import hash_results, hash_run
from app.runs.schema import EVALUATIONS, MODEL, MODEL_FOLDER, PREDICTIONS, STEPS


@pytest.fixture
def run(review_csv, tmp_path):
    return write_run(tmp_path / "run", review_csv())


def test_content_that_is_no_result_does_not_change_the_hash(run):
    before = hash_run(run)
    edit_step(run, 3, seconds=99.0)
    edit_json(run / "settings.json", path="trainer_run", strategy="zero3", world_size=8)
    edit_json(run / "metrics.json", train_seconds=99.0)
    (run / MODEL_FOLDER / "README.md").write_text("card")
    assert hash_run(run.rename(run.with_name("elsewhere"))) == before


@pytest.mark.parametrize("file", [f"{MODEL_FOLDER}/{MODEL}", PREDICTIONS, STEPS.name, EVALUATIONS.name])
def test_every_result_changes_the_hash(run, file):
    before, parts = hash_run(run), hash_results(run)
    content = (run / file).read_bytes()
    (run / file).write_bytes(content.replace(b"0.4", b"0.5", 1) if file.endswith("l") else content[:-1] + b"x")
    assert hash_run(run) != before
    assert [name for name, part in hash_results(run).items() if part != parts[name]] == [file]
    if file == EVALUATIONS.name:  # a run may have none
        changed = hash_run(run)
        (run / file).unlink()
        assert hash_run(run) not in (before, changed)


def test_the_hash_is_that_of_the_files_that_it_names(run):
    """So that old runs have the hash that `same_bits` has always printed."""
    steps = [json.loads(line) for line in (run / STEPS.name).read_text().splitlines()]
    for step in steps:
        del step["seconds"]
    contents = [(run / MODEL_FOLDER / MODEL).read_bytes(), (run / PREDICTIONS).read_bytes()]
    contents += [json.dumps(steps).encode(), (run / EVALUATIONS.name).read_bytes()]
    digests = "".join(hashlib.sha256(content).hexdigest() for content in contents)
    assert hash_run(run) == hashlib.sha256(digests.encode()).hexdigest()


def test_every_file_of_a_large_model_counts(run):
    (run / MODEL_FOLDER / MODEL).unlink()
    files = [run / MODEL_FOLDER / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    hashes = set()
    for contents in ("ab", "xb", "ax"):
        for file, content in zip(files, contents, strict=True):
            file.write_text(content)
        hashes.add(hash_run(run))
    assert len(hashes) == 3
