"""The hash of a run's results: they alone determine it, not the folder, times and descriptions."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest
from helpers.run_folders import write_run

from app.runs.hashes import hash_results, hash_run
from app.runs.schema import EVALUATIONS, MODEL, MODEL_FOLDER, PREDICTIONS, STEPS

WEIGHTS = f"{MODEL_FOLDER}/{MODEL}"


@pytest.mark.parametrize("change", ["none", "a run without evaluations", "a model of two files"])
def test_the_hash_covers_weights_predictions_evaluations_and_steps_without_their_times(review_csv, tmp_path, change):
    """As `same_bits` has always printed it, so that old runs keep theirs."""
    run = write_run(tmp_path / "run", review_csv())
    results = {name: (run / name).read_bytes() for name in (WEIGHTS, PREDICTIONS, STEPS.name, EVALUATIONS.name)}
    steps = [json.loads(line) for line in results[STEPS.name].splitlines()]
    for step in steps:
        del step["seconds"]
    results[STEPS.name] = json.dumps(steps).encode()
    if change == "a run without evaluations":
        (run / EVALUATIONS.name).unlink()
        results[EVALUATIONS.name] = b""
    elif change == "a model of two files":
        (run / WEIGHTS).rename(run / MODEL_FOLDER / "model-00001-of-00002.safetensors")
        (run / MODEL_FOLDER / "model-00002-of-00002.safetensors").write_bytes(b"more")
        results[WEIGHTS] += b"more"
    digests = {name: sha256(content).hexdigest() for name, content in results.items()}
    assert hash_results(run) == digests
    assert hash_run(run) == sha256("".join(digests.values()).encode()).hexdigest()
