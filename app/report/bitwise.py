"""Whether two runs are bitwise identical, and if not, where they first differ."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..common.errors import UserError
from ..metrics.score import name_f1
from ..runs.reader import Run
from ..runs.schema import MODEL, MODEL_FOLDER, probability_column

STEP_QUANTITIES = {"loss": "loss", "grad_norm": "gradient norm"}

Weights = dict[str, torch.Tensor]
Compared = Iterator[tuple[str, Any, Any]]  # what is compared, its value in A, and its value in B


def first_difference(a: Run, b: Run) -> str | None:
    """Return one line that names the first difference between two runs, or None if they are bitwise identical.

    Compared are, in this order: the loss and the gradient norm of each step, the number of steps, the predictions in
    file order, the test metrics, and the weights in a's order. 0.0 and -0.0 differ.

    Raises:
        UserError: the weights are missing, damaged or incomplete.
    """
    # Before anything is compared, so that damaged weights are reported even if the steps differ.
    weights_a, weights_b = (read_weights(run.folder / MODEL_FOLDER) for run in (a, b))
    for name, x, y in chain(_steps(a, b), _predictions(a, b)):
        if _bits(x) != _bits(y):
            return f"{name} is {x!r} in {a.folder} and {y!r} in {b.folder}"
    for name in weights_a | weights_b:
        v, w = weights_a.get(name), weights_b.get(name)
        if v is None or w is None:
            return f"weights: tensor {name!r} is only in {a.folder if w is None else b.folder}"
        if v.dtype != w.dtype or v.shape != w.shape or not torch.equal(_bytes(v), _bytes(w)):
            return f"weights: tensor {name!r} differs between {a.folder} and {b.folder}"
    return None


def first_differing_step(a: Run, b: Run) -> int | None:
    """Return the first of the common steps with another loss or gradient norm."""
    both = zip(a.steps, b.steps, strict=False)
    differing = (x["step"] for x, y in both if any(_bits(x.get(key)) != _bits(y.get(key)) for key in STEP_QUANTITIES))
    return next(differing, None)


def check_same_rows(a: Run, b: Run) -> None:
    """Check that two runs were trained and tested on the same rows.

    Raises:
        UserError: the splits differ.
    """
    if a.split["fingerprint"] != b.split["fingerprint"]:
        raise UserError(
            f"{a.folder} and {b.folder} have different splits ({a.split['fingerprint'][:16]} and "
            f"{b.split['fingerprint'][:16]}): train both on the same CSV with the same seed and sizes"
        )


def _bits(value: Any) -> Any:
    """Return the bytes of a number as float64, and anything else unchanged, such as a gradient norm that is missing."""
    return struct.pack("<d", value) if isinstance(value, float | int) else value


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _steps(a: Run, b: Run) -> Compared:
    for x, y in zip(a.steps, b.steps, strict=False):
        for key, name in STEP_QUANTITIES.items():
            # The gradient norm of a step that was skipped because of an overflow in fp16 is null.
            yield f"step {x['step']}: the {name}", x.get(key), y.get(key)
    yield "the number of steps", len(a.steps), len(b.steps)


def _predictions(a: Run, b: Run) -> Compared:
    yield "the list of classes", a.split["classes"], b.split["classes"]
    columns = {"row": "row", "review": "review", "label": "label", "predicted": "class"}
    columns |= {probability_column(name): f"probability of {name!r}" for name in a.split["classes"]}
    cells_a, cells_b = (zip(*(run.predictions[name].tolist() for name in columns), strict=True) for run in (a, b))
    for row_a, row_b in zip(cells_a, cells_b, strict=False):
        for name, x, y in zip(columns.values(), row_a, row_b, strict=True):
            yield f"prediction for row {row_a[0]}: the {name}", x, y
    yield "the number of predictions", len(a.predictions), len(b.predictions)
    yield "the F1 score", name_f1(positive_class(a), a.split["classes"]), name_f1(positive_class(b), b.split["classes"])
    for name in ("accuracy", "f1", "loss"):
        yield f"the test {name}", a.metrics[name], b.metrics[name]


def positive_class(run: Run) -> int | None:
    """Return the class whose F1 was computed. Runs of earlier versions did not record it: it was the second of two."""
    return run.metrics.get("positive_class", 1 if len(run.split["classes"]) == 2 else None)


def read_weights(folder: Path) -> Weights:
    """Map the tensors of all safetensors files of a folder into memory; a large model has several.

    Raises:
        UserError: there is none, or one is damaged.
    """
    weights: Weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            weights |= load_file(path)
        except (SafetensorError, OSError, ValueError) as problem:
            raise UserError(f"{path}: damaged or incomplete: {problem}") from None
    if not weights:
        raise UserError(f"{folder / MODEL}: missing: the run has not finished, or its model was deleted")
    return weights
