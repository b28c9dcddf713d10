"""Hashes of a run's results. Two runs with the same hash are bitwise identical.

The hash covers the final weights, the steps (losses, gradient norms, learning rates, numbers of examples and tokens),
the evaluations during training, and the predictions. It depends neither on the training path, the strategy and the
number of ranks nor on the folder and on times, so it can be compared between machines by reading two lines.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from .schema import EVALUATIONS, MODEL, MODEL_FOLDER, PREDICTIONS, STEPS

DIGITS = 16  # hexadecimal digits of a hash where a person reads it


def hash_run(folder: Path, model_folder: Path | None = None) -> str:
    """Return one hash of all parts that `hash_results` returns, 64 hexadecimal digits."""
    return hashlib.sha256("".join(hash_results(folder, model_folder).values()).encode()).hexdigest()


def hash_results(folder: Path, model_folder: Path | None = None) -> dict[str, str]:
    """Return a SHA-256 of each part of a run's results, by the name of its file.

    Args:
        model_folder: where the final model is; default: in the run's folder.

    Raises:
        OSError: a file cannot be read.
        ValueError: a line of steps.jsonl is damaged.
    """
    steps = [json.loads(line) for line in (folder / STEPS.name).read_text(encoding="utf-8").splitlines()]
    untimed = [{name: value for name, value in step.items() if name != "seconds"} for step in steps]
    evaluations = folder / EVALUATIONS.name  # does not exist without evaluations during training
    model_folder = model_folder or folder / MODEL_FOLDER
    # `save_pretrained` divides large models into several files.
    weights = sorted(model_folder.glob("model-*-of-*.safetensors")) or [model_folder / MODEL]
    return {
        f"{MODEL_FOLDER}/{MODEL}": hash_files(*weights),
        PREDICTIONS: hash_files(folder / PREDICTIONS),
        STEPS.name: hashlib.sha256(json.dumps(untimed).encode()).hexdigest(),
        EVALUATIONS.name: hash_files(*[evaluations] if evaluations.exists() else []),
    }


def hash_files(*paths: Path) -> str:
    """Return the SHA-256 of the contents of files in a row."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            hashlib.file_digest(file, lambda: digest)  # in chunks: the weights may be larger than the memory
    return digest.hexdigest()
