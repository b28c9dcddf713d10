"""Write a comparison as comparison.json, comparison.md and comparison.html."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..common.files import write_json, write_text
from ..common.formats import MIB
from . import charts
from .comparison import LISTED_ROWS
from .environments import html_environment, markdown_environment
from .explanation import NO_SETTINGS, flat_settings

ROWS_IN_TERMINAL = 5  # of those that both runs misclassify


def write_comparison(comparison: dict[str, Any], folder: Path) -> str:
    """Write the three files and return Markdown for the terminal, which lists fewer reviews than comparison.md.

    Args:
        comparison: from `compare_runs` or `compare_seeds`.
        folder: where to write; it must exist.
    """
    markdown, page = as_markdown(comparison), as_html(comparison)
    write_json(folder / "comparison.json", comparison)
    write_text(folder / "comparison.html", page)
    write_text(folder / "comparison.md", markdown)
    return as_markdown(comparison, ROWS_IN_TERMINAL)


def as_markdown(comparison: dict[str, Any], listed_rows: int = LISTED_ROWS) -> str:
    """Render a comparison as Markdown.

    Args:
        comparison: from `compare_runs` or `compare_seeds`.
        listed_rows: how many of the reviews that both runs misclassify to list at most.
    """
    template = markdown_environment().get_template("comparison.md.j2")
    return template.render(_context(comparison), listed_rows=listed_rows)


def as_html(comparison: dict[str, Any]) -> str:
    """Render a comparison as a self-contained page, without scripts and without requests."""
    names, losses = comparison["names"], comparison["losses"]
    svg = {
        "losses": charts.loss_curves(losses, names),
        "difference": charts.loss_difference(losses),
        "accuracies": charts.accuracies(accuracy_rows(comparison)),
        "reliability": charts.reliability(comparison["calibration"], names),
        "by_length": charts.accuracy_by_length(comparison["accuracy_by_length"], names),
    }
    if "seeds" in comparison:
        svg["over_seeds"] = charts.over_seeds(comparison["seeds"]["pairs"], names)
    return html_environment().get_template("page.html.j2").render(_context(comparison), plots=svg)


def _context(comparison: dict[str, Any]) -> dict[str, Any]:
    """Return the variables that both templates use."""
    return {
        "comparison": comparison,
        "names": comparison["names"],
        "seeds": comparison.get("seeds"),
        "headline": headline(comparison),
        "identity": identity(comparison),
        "hashes": hashes(comparison),
        "explanation": _capitalize(comparison["explanation"] or ""),
        "gpu_warning": gpu_warning(comparison),
        "scores": scores(comparison),
        "costs": costs(comparison),
        "settings": settings_rows(comparison),
        "disagreements": largest_difference_first(comparison["disagreements"]),
        "misclassified": with_confidence(comparison["misclassified_by_both"]),
        "confusions": confusions(comparison),
        "calibration": calibration_rows(comparison),
    }


# ---- template variables ----------------------------------------------------------------------------------------------


def headline(comparison: dict[str, Any]) -> str:
    """Return the verdict with a capital letter, unless it starts with the name of a run."""
    verdict: str = comparison["verdict"]
    return verdict if verdict.startswith(tuple(comparison["names"])) else _capitalize(verdict)


def identity(comparison: dict[str, Any]) -> str:
    """Return what is bitwise identical, or the first difference, in a sentence or two."""
    steps, rows = comparison["common_steps"], comparison["runs"][0]["n_test"]
    sentence = (
        f"the losses and gradient norms of all {steps} steps, the predictions for all {rows} test rows and all weights "
        "are bitwise identical."
    )
    if comparison["first_difference"] is not None:
        sentence = f"first difference: {comparison['first_difference']}."
    if "seeds" not in comparison:
        return _capitalize(sentence)
    pairs = comparison["seeds"]["pairs"]
    identical = sum(pair["first_difference"] is None for pair in pairs)
    return f"Bitwise identical for {identical} of {len(pairs)} seeds. With seed {pairs[0]['seed']}: {sentence}"


def hashes(comparison: dict[str, Any]) -> str:
    """Return the hashes of both runs, and why identical training may have different ones, in a line."""
    a, b = (run["hash"] for run in comparison["runs"])
    if a == b:
        return "not recorded: an earlier version wrote these runs" if a is None else f"{a} (both)"
    line = " and ".join(hash_ or "not recorded (an earlier version wrote the run)" for hash_ in (a, b))
    if comparison["first_difference"] is None and not comparison["same_evaluations"] and None not in (a, b):
        line += ": the evaluations during training, which are part of the hash, differ"
    return line


def gpu_warning(comparison: dict[str, Any]) -> str | None:
    """Return the warning about GPUs, unless the explanation says the same."""
    warning: str | None = comparison["gpu_warning"]
    return None if warning and warning in (comparison["explanation"] or "") else warning


def _capitalize(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def scores(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        _row(comparison, "test accuracy", "accuracy", form="{:.4f}"),
        _row(comparison, "F1", "f1", form="{:.4f}"),
        _row(comparison, "precision", "precision", form="{:.4f}"),
        _row(comparison, "recall", "recall", form="{:.4f}"),
        _row(comparison, "test loss", "loss", form="{:.4f}"),
    ]


def costs(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        _row(comparison, "ranks", "world_size", form="{:.0f}"),
        _row(comparison, "optimizer steps", "steps", form="{:,.0f}"),
        _row(comparison, "training time, s", "train_seconds", form="{:,.1f}"),
        _row(comparison, "reviews per second", "train_examples_per_second", form="{:,.1f}"),
        _row(comparison, "tokens per second", "train_tokens_per_second", form="{:,.0f}"),
        _row(comparison, "padding, %", "padding_fraction", form="{:.1f}", unit=0.01),
        _row(comparison, "model FLOPs utilization, %", "mfu", form="{:.1f}", unit=0.01),
        _row(comparison, "peak memory per rank, MiB", "peak_memory_bytes", form="{:,.0f}", unit=MIB),
    ]


def _row(comparison: dict[str, Any], name: str, key: str, *, form: str, unit: float = 1.0) -> dict[str, Any]:
    """Return one metric of both runs. As everywhere in the report, the difference is A - B."""
    values = [None if run[key] is None else _maximum(run[key]) / unit for run in comparison["runs"]]
    known = [value for value in values if value is not None]
    largest = max(known, default=0.0)
    return {
        "name": name,
        "cells": ["–" if value is None else form.format(value) for value in values],
        "shares": [value / largest if value and largest > 0 else 0.0 for value in values],
        "difference": _signed(known[0] - known[1], form) if len(known) == 2 else "–",
    }


def _signed(difference: float, form: str) -> str:
    return "=" if difference == 0 else ("+" if difference > 0 else "−") + form.format(abs(difference))


def _maximum(value: Any) -> float:
    """Return a number, or the maximum of one number per rank."""
    return float(max(value) if isinstance(value, list) else value)


def calibration_rows(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """Return `low`, `high` and `sides`, the bins of both runs, for the confidences that at least one of them has."""
    bins = zip(*(calibration["bins"] for calibration in comparison["calibration"]), strict=True)
    return [{"low": a["low"], "high": a["high"], "sides": [a, b]} for a, b in bins if a["n"] or b["n"]]


def accuracy_rows(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """Return name and interval of both runs, then of the baselines, the best one first."""
    statistics = comparison["statistics"]
    runs = [{"name": name} | statistics[f"accuracy_{x}"] for name, x in zip(comparison["names"], "ab", strict=True)]
    baselines = [{"name": baseline["name"]} | baseline["interval"] for baseline in comparison["floors"] or []]
    return runs + sorted(baselines, key=lambda baseline: -baseline["estimate"])


def settings_rows(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """Return `name`, `values` and `differs` of every setting, those that differ first."""
    a, b = (flat_settings(settings) for settings in comparison["settings"])
    names = [name for name in dict.fromkeys([*a, *b]) if name not in NO_SETTINGS]
    # The model's config has many keys, and other versions record others: those that differ are enough.
    of_config = {name for name in names if name.partition(".")[0] == "model_config"}
    names = [name for name in names if name not in of_config or (name in a and name in b and a[name] != b[name])]
    pairs = [["–" if (value := side.get(name)) is None else value for side in (a, b)] for name in names]
    rows = [{"name": name, "values": [x, y], "differs": x != y} for name, (x, y) in zip(names, pairs, strict=True)]
    return sorted(rows, key=lambda row: not row["differs"])


def with_confidence(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with the probability that each run assigned to the class that it predicted."""
    return [row | {"confidence": [max(of_run) for of_run in row["probabilities"]]} for row in rows]


def largest_difference_first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with confidence, sorted by the largest difference in a probability."""

    def difference(row: dict[str, Any]) -> float:
        return float(max(abs(x - y) for x, y in zip(*row["probabilities"], strict=True)))

    return sorted(with_confidence(rows), key=difference, reverse=True)


def confusions(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """Return `label`, `predicted` and `counts` of each pair of classes that a run confused, most frequent first."""
    classes, matrices = comparison["classes"], comparison["confusion_matrices"]
    pairs = [
        {"label": label, "predicted": predicted, "counts": [matrix[i][j] for matrix in matrices]}
        for i, label in enumerate(classes)
        for j, predicted in enumerate(classes)
        if i != j
    ]
    return sorted((pair for pair in pairs if any(pair["counts"])), key=lambda pair: -sum(pair["counts"]))
