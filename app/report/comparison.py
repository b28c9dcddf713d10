"""Compare two runs by their files. The result is plain data; render.py and charts.py present it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import confusion_matrix

from ..common.errors import UserError
from ..runs.reader import Run
from .baselines import measure_baselines
from .bitwise import check_same_rows, first_difference, first_differing_step, positive_class
from .explanation import explain
from .statistics import paired, verdict, wilson_interval

PER_RUN = ("accuracy", "f1", "loss", "n_test", "train_seconds", "train_examples_per_second", "peak_memory_bytes")
PER_RUN_IF_KNOWN = ("precision", "recall", "train_tokens_per_second", "padding_fraction", "hash")

NO_BASELINES = "not computed because of --no_baselines"
IDENTICAL_TRAINING = "Bitwise identical training"
LISTED_ROWS = 20  # of those that both runs misclassify


def compare_runs(a: Run, b: Run, baselines: bool = True) -> dict[str, Any]:
    """Return the content of comparison.json: everything that comparison.md and comparison.html show, in JSON types.

    Args:
        baselines: train the baselines on the same rows, which takes up to half a minute.

    Raises:
        UserError: the runs have different splits, or a file is damaged.
    """
    check_same_rows(a, b)
    difference = first_difference(a, b)
    correct_a, correct_b = ((run.predictions["label"] == run.predictions["predicted"]).to_numpy() for run in (a, b))
    compared = paired(correct_a, correct_b)
    differs = (a.predictions["predicted"] != b.predictions["predicted"]).to_numpy()
    disagreements = _describe_rows(a, b, differs.nonzero()[0])
    # Most confident first, by the mean of the two confidences.
    confidence = sum(run.probabilities.to_numpy().max(axis=1) for run in (a, b))
    wrong = (~correct_a & ~correct_b).nonzero()[0]
    misclassified = wrong[np.argsort(-confidence[wrong], kind="stable")]
    losses = [[step["loss"] for step in run.steps] for run in (a, b)]
    return {
        "names": run_names(a, b),
        "first_difference": difference,
        "first_differing_step": first_differing_step(a, b),
        "explanation": difference and explain(a, b, difference),
        "verdict": IDENTICAL_TRAINING if difference is None else verdict(compared, *run_names(a, b), unit="test row"),
        "statistics": {
            "n": compared.n,
            "a_only": int((correct_a & ~correct_b).sum()),
            "b_only": int((correct_b & ~correct_a).sum()),
            "accuracy_a": wilson_interval(int(correct_a.sum()), compared.n),
            "accuracy_b": wilson_interval(int(correct_b.sum()), compared.n),
            "difference": compared.difference,
            "p_value": compared.p_value,
        },
        "same_evaluations": a.evaluations == b.evaluations,
        "runs": [
            {"path": run.settings["path"], "folder": str(run.folder), "world_size": run.settings["world_size"]}
            | {name: run.metrics[name] for name in PER_RUN}
            | {name: run.metrics.get(name) for name in PER_RUN_IF_KNOWN}
            | {"steps": len(run.steps), "positive_class": positive_class(run)}
            for run in (a, b)
        ],
        "split_fingerprint": a.split["fingerprint"],
        "csv": a.split.get("csv"),
        "classes": a.split["classes"],
        "common_steps": min(map(len, losses)),
        "max_loss_difference": max(abs(x - y) for x, y in zip(*losses, strict=False)),
        "same_predictions": not disagreements,
        **_baselines(a, baselines),
        "confusion_matrices": [
            confusion_matrix(run.predictions["label"], run.predictions["predicted"], labels=a.split["classes"]).tolist()
            for run in (a, b)
        ],
        "disagreements": disagreements,
        "misclassified_by_both": _describe_rows(a, b, misclassified[:LISTED_ROWS]),
        "n_misclassified_by_both": len(misclassified),
        "settings": [run.settings for run in (a, b)],
        "losses": losses,
    }


def compare_seeds(pairs: Sequence[Sequence[Run]], baselines: bool = True) -> dict[str, Any]:
    """Compare pairs of runs, one pair per seed.

    Returns:
        The comparison of the first pair that differs, or else of the first one, with the verdict over all seeds and the
        key `seeds`: `pairs` (one entry per seed), `paired_seeds` (`paired` of the accuracies) and `verdict`.
    """
    comparisons = [compare_runs(a, b, baselines) for a, b in pairs]
    kept = ("first_differing_step", "first_difference", "explanation", "verdict")
    entries = [
        {"seed": of_seed["settings"][0]["seed"], "baselines": of_seed["floors"]}
        | {"runs": [{name: run[name] for name in ("accuracy", "loss", "folder")} for run in of_seed["runs"]]}
        | {name: of_seed[name] for name in kept}
        for of_seed in comparisons
    ]
    accuracies = [[entry["runs"][side]["accuracy"] for entry in entries] for side in (0, 1)]
    statistics = paired(*accuracies)
    differing = [of_seed for of_seed in comparisons if of_seed["first_difference"] is not None]
    conclusion = verdict(statistics, *comparisons[0]["names"], unit="seed") if differing else IDENTICAL_TRAINING
    over_seeds = {"pairs": entries, "paired_seeds": dataclasses.asdict(statistics), "verdict": conclusion}
    return [*differing, *comparisons][0] | {"verdict": conclusion, "seeds": over_seeds}


def run_names(a: Run, b: Run) -> list[str]:
    """Return the names of two runs: their training paths or, of the same one, the end of their folders that differs."""
    names = [str(run.settings["path"]) for run in (a, b)]
    if names[0] != names[1]:
        return names
    parts = [run.folder.resolve().parts[::-1] for run in (a, b)]
    n_equal = len([*takewhile(lambda pair: pair[0] == pair[1], zip(*parts, strict=False))])
    return [str(Path(*of_run[n_equal::-1])) for of_run in parts]


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


def _baselines(run: Run, is_wanted: bool) -> dict[str, Any]:
    """Return the baselines, or None and the reason, under the keys of the first version, which old files have, too."""
    if not is_wanted:
        return {"floors": None, "why_no_floors": NO_BASELINES}
    try:
        return {"floors": measure_baselines(run), "why_no_floors": None}
    except UserError as problem:
        return {"floors": None, "why_no_floors": str(problem)}
