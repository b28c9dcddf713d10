"""Whether two runs are bitwise identical, and if not, where they first differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..common.errors import UserError
from ..equality import compare_values
from ..metrics.score import name_f1
from ..runs.reader import Run
from ..runs.schema import MODEL, MODEL_FOLDER, probability_column

STEP_QUANTITIES = {"loss": "loss", "grad_norm": "gradient norm"}

Weights = dict[str, torch.Tensor]


def first_difference(a: Run, b: Run) -> str | None:
    """Return one line that names the first difference between two runs, or None if they are bitwise identical.

    Compared are, in this order: the loss and the gradient norm of each step, the number of steps, the predictions in
    file order, the test metrics, and the weights in a's order. 0.0 and -0.0 differ.

    Raises:
        UserError: the weights are missing, damaged or incomplete.
    """
    # Before anything is compared, so that damaged weights are reported even if the steps differ.
    weights_a, weights_b = (read_weights(run.folder / MODEL_FOLDER) for run in (a, b))
    for (text, x), (_, y) in zip(_results(a), _results(b), strict=True):
        values = compare_values(x, y)
        for found in values[~values["equal"]].head(1).to_dict("records"):
            name = text.format_map(found | {"row": a.predictions["row"].get(found["step"])})
            return f"{name} is {found['A']!r} in {a.folder} and {found['B']!r} in {b.folder}"
    for name in weights_a | weights_b:
        v, w = weights_a.get(name), weights_b.get(name)
        if v is None or w is None:
            return f"weights: tensor {name!r} is only in {a.folder if w is None else b.folder}"
        if v.dtype != w.dtype or v.shape != w.shape or not torch.equal(_bytes(v), _bytes(w)):
            return f"weights: tensor {name!r} differs between {a.folder} and {b.folder}"
    return None


def first_differing_step(a: Run, b: Run) -> int | None:
    """Return the first of the common steps with another loss or gradient norm."""
    values = compare_values(_steps(a), _steps(b))
    return next(iter(values["step"][~values["equal"]]), None)


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


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _results(run: Run) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the results of a run as tables for `compare_values`, each with the text that names one of its values."""
    yield "step {step}: the {quantity}", _steps(run)
    facts = {"number of steps": len(run.steps), "list of classes": run.split["classes"]}
    yield "the {quantity}", _table(pd.DataFrame([facts], dtype=object))
    columns = {"row": "row", "review": "review", "label": "label", "predicted": "class"}
    columns |= {probability_column(name): f"probability of {name!r}" for name in run.split["classes"]}
    yield "prediction for row {row}: the {quantity}", _table(run.predictions[[*columns]].rename(columns=columns))
    f1 = name_f1(positive_class(run), run.split["classes"])
    facts = {"number of predictions": len(run.predictions), "F1 score": f1}
    facts |= {f"test {name}": run.metrics[name] for name in ("accuracy", "f1", "loss")}
    yield "the {quantity}", _table(pd.DataFrame([facts], dtype=object))


def _steps(run: Run) -> pd.DataFrame:
    # The gradient norm of a step that was skipped because of an overflow in fp16 is null.
    steps = pd.DataFrame(run.steps, columns=["step", *STEP_QUANTITIES], dtype="float64").astype({"step": "int64"})
    return _table(steps.set_index("step").rename(columns=STEP_QUANTITIES))


def _table(wide: pd.DataFrame) -> pd.DataFrame:
    """Return a row per cell: step, quantity and value."""
    return wide.melt(ignore_index=False, var_name="quantity").rename_axis("step").reset_index()


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
