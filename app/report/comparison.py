"""Compare two runs by their files. The result is plain data; render.py and charts.py present it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn import metrics

from ..common.errors import UserError
from ..data.split import describe_duplicates
from ..runs.reader import Run
from ..runs.schema import PREDICTIONS
from .baselines import measure_baselines
from .bitwise import check_same_rows, first_difference, first_differing_step
from .explanation import conclude, explain, on_gpus_without_deterministic
from .statistics import (
    accuracy_by_length,
    calibration_bins,
    expected_calibration_error,
    paired_rows,
    paired_seeds,
    verdict,
)

PER_RUN = ("accuracy", "f1", "loss", "n_test", "train_seconds", "train_examples_per_second", "peak_memory_bytes")
PER_RUN_IF_KNOWN = ("precision", "recall", "train_tokens_per_second", "padding_fraction", "mfu", "hash")

Baselines = tuple[list[dict[str, Any]] | None, str | None]  # or None and the reason
NO_BASELINES = "not computed because of --no_baselines"
LISTED_ROWS = 20  # of those that both runs misclassify


def compare_runs(a: Run, b: Run, baselines: bool = True) -> dict[str, Any]:
    """Return the content of comparison.json: everything that comparison.md and comparison.html show, in JSON types.

    Args:
        baselines: train the baselines on the same rows, which takes up to half a minute.

    Raises:
        UserError: the runs have different splits, or a file is damaged.
    """
    difference = _difference(a, b)
    differs = (a.predictions["predicted"] != b.predictions["predicted"]).to_numpy()
    disagreements = _describe_rows(a, b, differs.nonzero()[0])
    misclassified = find_misclassified_by_both(a, b)
    baseline_metrics, why_no_baselines = _baselines(a) if baselines else (None, NO_BASELINES)
    losses = [[step["loss"] for step in run.steps] for run in (a, b)]
    return {
        "names": run_names(a, b),
        **{name: difference[name] for name in ("verdict", "first_difference", "explanation")},
        "gpu_warning": on_gpus_without_deterministic(a, b),
        "same_evaluations": a.evaluations == b.evaluations,
        "runs": [
            {"path": run.path, "folder": str(run.folder), "world_size": run.settings["world_size"]}
            | {name: run.metrics[name] for name in PER_RUN}
            | {name: run.metrics.get(name) for name in PER_RUN_IF_KNOWN}
            | {"steps": len(run.steps)}
            for run in (a, b)
        ],
        "split_fingerprint": a.split["fingerprint"],
        "csv": a.split.get("csv"),
        "duplicates": _duplicates(a),
        "classes": a.split["classes"],
        "common_steps": min(map(len, losses)),
        "first_differing_step": difference["first_differing_step"],
        "max_loss_difference": _max_difference(*losses),
        "same_predictions": not disagreements,
        "same_probabilities": a.probabilities.equals(b.probabilities),
        "statistics": dataclasses.asdict(paired_rows(_correct(a), _correct(b))),
        "floors": baseline_metrics,  # the keys of the first version, so that old and new files have the same format
        "why_no_floors": why_no_baselines,
        "calibration": [calibration(run) for run in (a, b)],
        "accuracy_by_length": [by_length(run) for run in (a, b)],
        "confusion_matrices": [confusion_matrix(run) for run in (a, b)],
        "disagreements": disagreements,
        "misclassified_by_both": misclassified[:LISTED_ROWS],
        "n_misclassified_by_both": len(misclassified),
        "settings": [run.settings for run in (a, b)],
        "evaluations": [run.evaluations for run in (a, b)],
        "losses": losses,
    }


def compare_seeds(pairs: Sequence[tuple[Run, Run]], baselines: bool = True) -> dict[str, Any]:
    """Compare pairs of runs, one pair per seed.

    Args:
        baselines: as for `compare_runs`, for each seed.

    Returns:
        The comparison of the first pair, with the verdict over all seeds and the key `seeds`: `pairs` (one entry per
        seed), `paired_seeds` (mean and standard deviation of the accuracies, Student's paired t test and interval),
        `verdict` and `baselines` (the same statistics of the first path and each baseline, which is trained for each
        seed; empty if a seed has none, for the reason in `why_no_baselines`).
    """
    first = compare_runs(*pairs[0], baselines)
    entries = [_compare_seed(a, b, first if i == 0 else _difference(a, b)) for i, (a, b) in enumerate(pairs)]
    accuracies = [[run.metrics["accuracy"] for run in runs] for runs in zip(*pairs, strict=True)]
    statistics = paired_seeds(*accuracies)
    found: list[Baselines] = [(first["floors"], first["why_no_floors"])]
    found += [_baselines(a) if baselines else (None, NO_BASELINES) for a, _ in pairs[1:]]
    for entry, (of_seed, _) in zip(entries, found, strict=True):
        entry["baselines"] = of_seed
    explanations = [entry["explanation"] for entry in entries if entry["first_difference"] is not None]
    conclusion = verdict(statistics, *first["names"], bitwise_identical=not explanations)
    over_seeds = {
        "pairs": entries,
        "paired_seeds": dataclasses.asdict(statistics),
        "verdict": conclusion,
        "baselines": _compare_with_baselines(accuracies[0], [of_seed for of_seed, _ in found]),
        "why_no_baselines": next((why for of_seed, why in found if of_seed is None), None),
    }
    explanation = next(iter(explanations), None)
    return first | {"verdict": conclusion, "explanation": explanation, "seeds": over_seeds}


def conclusion_of(comparison: dict[str, Any]) -> str:
    """Return `conclude` for a result of `compare_runs` or `compare_seeds`; the first pair that differs decides."""
    for pair in comparison["seeds"]["pairs"] if "seeds" in comparison else []:
        if pair["first_difference"] is not None:
            return conclude(f"seed {pair['seed']}: {pair['first_difference']}", pair["explanation"])
    return conclude(comparison["first_difference"], comparison["explanation"])


def run_names(a: Run, b: Run) -> list[str]:
    """Return the names of two runs: their training paths, marked A and B if both used the same one."""
    return [a.path, b.path] if a.path != b.path else [f"A ({a.path})", f"B ({b.path})"]


def find_misclassified_by_both(a: Run, b: Run) -> list[dict[str, Any]]:
    """Return the test rows that both runs misclassify, most confident first, by the mean of the two confidences."""
    rows = (~_correct(a) & ~_correct(b)).nonzero()[0]
    confidence = np.mean([run.probabilities.to_numpy().max(axis=1) for run in (a, b)], axis=0)
    return _describe_rows(a, b, rows[np.argsort(-confidence[rows], kind="stable")])


def _describe_rows(a: Run, b: Run, positions: NDArray[np.intp]) -> list[dict[str, Any]]:
    """Return row number, label, both predictions, all probabilities and the review of some test rows."""
    probabilities = [run.probabilities.to_numpy() for run in (a, b)]
    return [
        {
            "row": int(a.predictions["row"].iloc[i]),
            "label": a.predictions["label"].iloc[i],
            "predicted": [run.predictions["predicted"].iloc[i] for run in (a, b)],
            "probabilities": [of_run[i].tolist() for of_run in probabilities],
            "review": a.predictions["review"].iloc[i],
        }
        for i in positions
    ]


def calibration(run: Run) -> dict[str, Any]:
    """Return the expected calibration error and the bins of the reliability diagram."""
    try:
        bins = calibration_bins(run.probabilities.to_numpy(), run.class_ids("label"))
    except ValueError as problem:
        raise UserError(f"{run.folder / PREDICTIONS}: {problem}") from None
    return {"ece": expected_calibration_error(bins), "bins": [dataclasses.asdict(row) for row in bins]}


def by_length(run: Run) -> list[dict[str, Any]]:
    """Return the accuracy of short to long reviews, in four groups of about equal size; lengths are in characters."""
    lengths = run.predictions["review"].str.len().to_numpy(np.int64)
    return [dataclasses.asdict(group) for group in accuracy_by_length(lengths, _correct(run))]


def confusion_matrix(run: Run) -> list[list[int]]:
    """Return a matrix whose element [i][j] counts the test rows of class i that were predicted as class j."""
    labels, classes = run.predictions["label"], run.split["classes"]
    matrix: list[list[int]] = metrics.confusion_matrix(labels, run.predictions["predicted"], labels=classes).tolist()
    return matrix


def _difference(a: Run, b: Run) -> dict[str, Any]:
    """Return where two runs on the same rows first differ, why, and the verdict."""
    check_same_rows(a, b)
    difference, differing_step = first_difference(a, b), first_differing_step(a, b)
    rows = paired_rows(_correct(a), _correct(b))
    return {
        "first_differing_step": differing_step and differing_step[0],
        "first_difference": difference,
        "explanation": difference and explain(a, b, difference),
        "verdict": verdict(rows, *run_names(a, b), bitwise_identical=difference is None),
    }


def _compare_seed(a: Run, b: Run, difference: dict[str, Any]) -> dict[str, Any]:
    runs = [
        {"accuracy": run.metrics["accuracy"], "loss": run.metrics["loss"], "folder": str(run.folder)} for run in (a, b)
    ]
    names = ("first_differing_step", "first_difference", "explanation", "verdict")
    return {"seed": a.settings["seed"], "runs": runs} | {name: difference[name] for name in names}


def _compare_with_baselines(
    accuracies: list[float], of_seeds: Sequence[list[dict[str, Any]] | None]
) -> list[dict[str, Any]]:
    """Compare the accuracies of a path, one per seed, with those of each baseline; none if a seed has no baselines."""
    known = [of_seed for of_seed in of_seeds if of_seed is not None]
    if len(known) < len(of_seeds):
        return []
    return [
        {
            "name": of_one[0]["name"],
            "paired_seeds": dataclasses.asdict(paired_seeds(accuracies, [entry["accuracy"] for entry in of_one])),
        }
        for of_one in zip(*known, strict=True)
    ]


def _duplicates(run: Run) -> str | None:
    """Return the line about reviews that occur in several parts; None if there are none, or if it is not recorded."""
    counts = run.split.get("duplicates")
    if counts is None:
        return None
    return describe_duplicates(counts, run.split.get("n_validation") or 0, run.split["n_test"])


def _baselines(run: Run) -> Baselines:
    """Return the baselines, or None and the reason."""
    try:
        return measure_baselines(run), None
    except UserError as problem:
        return None, str(problem)


def _correct(run: Run) -> NDArray[np.bool_]:
    return np.asarray(run.predictions["label"] == run.predictions["predicted"], dtype=bool)


def _max_difference(losses_a: list[float], losses_b: list[float]) -> float | None:
    """Return the maximum over the common steps, or None if it overflows."""
    largest = max((abs(x - y) for x, y in zip(losses_a, losses_b, strict=False)), default=0.0)
    return largest if math.isfinite(largest) else None
