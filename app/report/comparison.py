"""Where do two runs agree? Facts from their files; words and pictures are made of them elsewhere."""

from __future__ import annotations

from typing import Any

from app.errors import UserError
from app.report.runs import Run

PER_RUN = ("accuracy", "f1", "loss", "n_test", "train_seconds", "train_examples_per_second", "peak_memory_bytes")


def compare_runs(a: Run, b: Run) -> dict[str, Any]:
    """The content of comparison.json.

    Raises:
        UserError: the runs were split differently: their figures are of other rows and can't be compared.
    """
    if a.split["fingerprint"] != b.split["fingerprint"]:
        raise UserError(
            f"{a.folder} and {b.folder} have different splits ({a.split['fingerprint'][:16]} and "
            f"{b.split['fingerprint'][:16]}): train both on the same CSV with the same seed and sizes"
        )
    if list(a.predictions["row"]) != list(b.predictions["row"]):
        raise UserError(f"{a.folder} and {b.folder} say the same split but predict other rows: one was altered")
    differences = [abs(x["loss"] - y["loss"]) for x, y in zip(a.steps, b.steps, strict=False)]
    differing = [x["step"] for x, y in zip(a.steps, b.steps, strict=False) if x["loss"] != y["loss"]]
    disagreements = find_disagreements(a, b)
    return {
        "runs": [
            {"path": run.path, "folder": str(run.folder), "world_size": run.settings["world_size"]}
            | {name: run.metrics[name] for name in PER_RUN}
            | {"steps": len(run.steps)}
            for run in (a, b)
        ],
        "split_fingerprint": a.split["fingerprint"],
        "common_steps": len(differences),
        "first_differing_step": differing[0] if differing else None,
        "max_loss_difference": max(differences, default=0.0),
        "same_predictions": not disagreements,
        "same_probabilities": a.probabilities.equals(b.probabilities),
        "disagreements": disagreements,
    }


def find_disagreements(a: Run, b: Run) -> list[dict[str, Any]]:
    """The test rows that the two runs put into different classes, in file order, with each one's own confidence."""
    rows = (a.predictions["predicted"] != b.predictions["predicted"]).to_numpy().nonzero()[0]
    return [
        {
            "row": int(a.predictions["row"].iloc[i]),
            "label": a.predictions["label"].iloc[i],
            "predicted": [run.predictions["predicted"].iloc[i] for run in (a, b)],
            "probabilities": [run.probabilities.iloc[i].tolist() for run in (a, b)],
            "review": a.predictions["review"].iloc[i],
        }
        for i in rows
    ]
