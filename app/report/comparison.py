"""Where do two runs agree? Facts from their files; words and pictures are made of them elsewhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.errors import UserError
from app.report.baselines import measure_baselines
from app.report.bitwise import bitwise_equal_numbers, first_difference, first_differing_step
from app.report.statistics import (
    accuracy_by_length,
    calibration_bins,
    expected_calibration_error,
    paired_rows,
    paired_seeds,
    verdict,
)
from app.runs.reader import Run
from app.runs.schema import PREDICTIONS

PER_RUN = ("accuracy", "f1", "loss", "n_test", "train_seconds", "train_examples_per_second", "peak_memory_bytes")
PER_RUN_IF_KNOWN = ("precision", "recall", "train_tokens_per_second", "padding_fraction", "mfu")

NO_BASELINES = "not computed, as --no_baselines asked"


def compare_runs(a: Run, b: Run, baselines: bool = True) -> dict[str, Any]:
    """The content of comparison.json: all that comparison.md and comparison.html show, and nothing but JSON's types.

    Args:
        a: The first run.
        b: The second run.
        baselines: Train the baselines on the same rows, which takes about a minute for 100,000 of them.

    Raises:
        UserError: the runs were split differently: their figures are of other rows and can't be compared; or a file of
            theirs is damaged.
    """
    check_same_rows(a, b)
    names = run_names(a, b)
    apart, step_apart = first_difference(a, b), first_differing_step(a, b)
    disagreements = find_disagreements(a, b)
    rows = paired_rows(_correct(a), _correct(b))
    floors, why_no_floors = _baselines(a) if baselines else (None, NO_BASELINES)
    losses = [[step["loss"] for step in run.steps] for run in (a, b)]
    return {
        "names": names,
        "verdict": verdict(rows, *names, bitwise_equal=apart is None),
        "first_difference": apart,
        "runs": [
            {"path": run.path, "folder": str(run.folder), "world_size": run.settings["world_size"]}
            | {name: run.metrics[name] for name in PER_RUN}
            | {name: run.metrics.get(name) for name in PER_RUN_IF_KNOWN}
            | {"steps": len(run.steps)}
            for run in (a, b)
        ],
        "split_fingerprint": a.split["fingerprint"],
        "csv": a.split.get("csv"),
        "classes": a.split["classes"],
        "common_steps": min(map(len, losses)),
        "first_differing_step": step_apart and step_apart[0],
        "max_loss_difference": _largest_difference(*losses),
        "same_predictions": not disagreements,
        "same_probabilities": a.probabilities.equals(b.probabilities),
        "statistics": dataclasses.asdict(rows),
        "floors": floors,
        "why_no_floors": why_no_floors,
        "calibration": [calibration(run) for run in (a, b)],
        "accuracy_by_length": [by_length(run) for run in (a, b)],
        "confusion_matrices": [confusion_matrix(run) for run in (a, b)],
        "disagreements": disagreements,
        "settings": [run.settings for run in (a, b)],
        "evaluations": [run.evaluations for run in (a, b)],
        "losses": losses,
    }


def compare_seeds(pairs: Sequence[tuple[Run, Run]], baselines: bool = True) -> dict[str, Any]:
    """The first pair's comparison with `seeds` beside it, and for its verdict the one over all seeds.

    `seeds` holds `pairs` (a line a seed), `paired_seeds` (mean and standard deviation of the accuracies, Student's
    paired t test and interval) and `verdict`.

    Raises:
        UserError: no pair, a seed that comes twice or differs within a pair, or what `compare_runs` raises.
    """
    if not pairs:
        raise UserError("no pair of runs to compare")
    seeds = [a.settings["seed"] for a, _ in pairs]
    for a, b in pairs:
        check_same_rows(a, b)
        if a.settings["seed"] != b.settings["seed"] or seeds.count(a.settings["seed"]) > 1:
            raise UserError(f"{a.folder} and {b.folder}: a pair must share a seed that no other pair has")
    first = compare_runs(*pairs[0], baselines)
    lines = [_seed_line(*pair) for pair in pairs]
    ours, theirs = ([line["runs"][side]["accuracy"] for line in lines] for side in (0, 1))
    found = paired_seeds(ours, theirs)
    words = verdict(found, *first["names"], bitwise_equal=all(line["first_difference"] is None for line in lines))
    over_seeds = {"pairs": lines, "paired_seeds": dataclasses.asdict(found), "verdict": words}
    return first | {"verdict": words, "seeds": over_seeds}


def first_difference_of(comparison: dict[str, Any]) -> str | None:
    """The first difference that `compare_runs` or `compare_seeds` has found, of any seed."""
    pairs = comparison["seeds"]["pairs"] if "seeds" in comparison else []
    over_seeds = [f"seed {pair['seed']}: {pair['first_difference']}" for pair in pairs if pair["first_difference"]]
    return over_seeds[0] if over_seeds else comparison["first_difference"]


def check_same_rows(a: Run, b: Run) -> None:
    """
    Raises:
        UserError: the two were trained or tested on different rows.
    """
    if a.split["fingerprint"] != b.split["fingerprint"]:
        raise UserError(
            f"{a.folder} and {b.folder} have different splits ({a.split['fingerprint'][:16]} and "
            f"{b.split['fingerprint'][:16]}): train both on the same CSV with the same seed and sizes"
        )
    if list(a.predictions["row"]) != list(b.predictions["row"]):
        raise UserError(f"{a.folder} and {b.folder} say the same split but predict other rows: one was altered")


def run_names(a: Run, b: Run) -> list[str]:
    """What to call the two: their roads, or A and B where they took the same one."""
    return [a.path, b.path] if a.path != b.path else [f"A ({a.path})", f"B ({b.path})"]


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


def calibration(run: Run) -> dict[str, Any]:
    """Expected calibration error and the table of the reliability diagram."""
    probabilities, labels = run.probabilities.to_numpy(), run.class_ids("label")
    try:
        bins = [dataclasses.asdict(row) for row in calibration_bins(probabilities, labels)]
        return {"ece": expected_calibration_error(probabilities, labels), "bins": bins}
    except ValueError as problem:
        raise UserError(f"{run.folder / PREDICTIONS}: {problem}") from None


def by_length(run: Run) -> list[dict[str, Any]]:
    """Accuracy of the test rows from short to long, in four groups of about equal size; lengths in characters."""
    lengths = run.predictions["review"].str.len().to_numpy(np.int64)
    return [dataclasses.asdict(group) for group in accuracy_by_length(lengths, _correct(run))]


def confusion_matrix(run: Run) -> list[list[int]]:
    """`matrix[i][j]`: the test rows of class i that were predicted as class j."""
    size = len(run.split["classes"])
    cells = run.class_ids("label") * size + run.class_ids("predicted")
    matrix: list[list[int]] = np.bincount(cells, minlength=size * size).reshape(size, size).tolist()
    return matrix


def _seed_line(a: Run, b: Run) -> dict[str, Any]:
    apart, step_apart = first_difference(a, b), first_differing_step(a, b)
    rows = paired_rows(_correct(a), _correct(b))
    return {
        "seed": a.settings["seed"],
        "runs": [
            {name: run.metrics[name] for name in ("accuracy", "loss")} | {"folder": str(run.folder)} for run in (a, b)
        ],
        "first_differing_step": step_apart and step_apart[0],
        "first_difference": apart,
        "verdict": verdict(rows, *run_names(a, b), bitwise_equal=apart is None),
    }


def _baselines(run: Run) -> tuple[list[dict[str, Any]] | None, str | None]:
    """The floors, or None and why there are none."""
    try:
        return measure_baselines(run), None
    except UserError as problem:
        return None, str(problem)


def _correct(run: Run) -> NDArray[np.bool_]:
    return np.asarray(run.predictions["label"] == run.predictions["predicted"], dtype=bool)


def _largest_difference(ours: list[float], theirs: list[float]) -> float | None:
    """Over the common steps; None where a loss that differs is no number."""
    differences = [0.0 if bitwise_equal_numbers(x, y) else abs(x - y) for x, y in zip(ours, theirs, strict=False)]
    return max(differences, default=0.0) if all(map(math.isfinite, differences)) else None
