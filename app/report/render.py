"""A comparison in words, tables and pictures: comparison.json, comparison.md and comparison.html."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.files import write_json, write_text
from app.report import plots
from app.report.formats import html_environment, markdown_environment

MIB = 2**20
NOT_TRAINING_SETTINGS = ("path", "output_dir", "logging_steps", "disable_tqdm")  # says nothing about what was trained


def write_comparison(comparison: dict[str, Any], folder: Path) -> str:
    """Writes the files into `folder` and returns the Markdown, which is also readable in a terminal."""
    markdown, page = as_markdown(comparison), as_html(comparison)
    write_json(folder / "comparison.json", comparison)
    write_text(folder / "comparison.html", page)
    write_text(folder / "comparison.md", markdown)
    return markdown


def as_markdown(comparison: dict[str, Any]) -> str:
    return markdown_environment().get_template("comparison.md.j2").render(_context(comparison))


def as_html(comparison: dict[str, Any]) -> str:
    """One self-contained page: no script, no request."""
    names, losses = comparison["names"], comparison["losses"]
    pictures = {
        "losses": plots.loss_curves(losses, names),
        "difference": plots.loss_difference(losses),
        "accuracies": plots.accuracies(accuracy_rows(comparison)),
        "reliability": plots.reliability(comparison["calibration"], names),
        "by_length": plots.accuracy_by_length(comparison["accuracy_by_length"], names),
    }
    if "seeds" in comparison:
        pictures["over_seeds"] = plots.over_seeds(comparison["seeds"]["pairs"], names)
    return html_environment().get_template("page.html.j2").render(_context(comparison), figures=pictures)


def _context(comparison: dict[str, Any]) -> dict[str, Any]:
    return {
        "comparison": comparison,
        "names": comparison["names"],
        "seeds": comparison.get("seeds"),
        "headline": headline(comparison),
        "sameness": sameness(comparison),
        "scores": scores(comparison),
        "costs": costs(comparison),
        "settings": settings_rows(comparison),
        "disagreements": clearest_first(comparison["disagreements"]),
        "confusions": confusions(comparison),
    }


# ---- what the templates print ---------------------------------------------------------------------------------------


def headline(comparison: dict[str, Any]) -> str:
    """The verdict as a sentence of its own: a capital letter, unless it begins with the name of a run."""
    words: str = comparison["verdict"]
    return words if words.startswith(tuple(comparison["names"])) else words[:1].upper() + words[1:]


def sameness(comparison: dict[str, Any]) -> str:
    """How far the two are equal to the bit, in a sentence or two."""
    if "seeds" in comparison:
        pairs = comparison["seeds"]["pairs"]
        equal = sum(pair["first_difference"] is None for pair in pairs)
        over_seeds = f"Equal to the bit at {equal} of {len(pairs)} seeds. At seed {pairs[0]['seed']}: "
        return over_seeds + _sameness(comparison)
    sentence = _sameness(comparison)
    return sentence[:1].upper() + sentence[1:]


def _sameness(comparison: dict[str, Any]) -> str:
    if comparison["first_difference"] is not None:
        return f"first difference: {comparison['first_difference']}."
    steps, rows = comparison["common_steps"], comparison["runs"][0]["n_test"]
    return (
        f"loss and gradient norm of all {steps} steps, the predictions for all {rows} test rows and every weight are "
        "equal to the bit."
    )


def scores(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of quality, side by side."""
    return [
        _row(comparison, "test accuracy", "accuracy", "{:.4f}"),
        _row(comparison, "F1", "f1", "{:.4f}"),
        _row(comparison, "precision", "precision", "{:.4f}"),
        _row(comparison, "recall", "recall", "{:.4f}"),
        _row(comparison, "test loss", "loss", "{:.4f}"),
    ]


def costs(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of speed and memory, side by side."""
    return [
        _row(comparison, "ranks", "world_size", "{:.0f}"),
        _row(comparison, "optimizer steps", "steps", "{:,.0f}"),
        _row(comparison, "training seconds", "train_seconds", "{:,.1f}"),
        _row(comparison, "reviews a second", "train_examples_per_second", "{:,.1f}"),
        _row(comparison, "tokens a second", "train_tokens_per_second", "{:,.0f}"),
        _row(comparison, "padding, %", "padding_fraction", "{:.1f}", 0.01),
        _row(comparison, "model FLOPs utilisation, %", "mfu", "{:.1f}", 0.01),
        _row(comparison, "peak memory of a rank, MiB", "peak_memory_bytes", "{:,.0f}", MIB),
    ]


def _row(comparison: dict[str, Any], name: str, key: str, form: str, unit: float = 1.0) -> dict[str, Any]:
    """One figure of both runs. A difference is the first run's less the second's, as everywhere in the report."""
    values = [None if run[key] is None else _largest(run[key]) / unit for run in comparison["runs"]]
    known = [value for value in values if value is not None]
    longest = max(known, default=0.0)
    return {
        "name": name,
        "cells": ["–" if value is None else form.format(value) for value in values],
        "shares": [value / longest if value and longest > 0 else 0.0 for value in values],
        "difference": _signed(known[0] - known[1], form) if len(known) == 2 else "–",
    }


def _signed(difference: float, form: str) -> str:
    return "=" if difference == 0 else ("+" if difference > 0 else "−") + form.format(abs(difference))


def _largest(value: Any) -> float:
    return float(max(value) if isinstance(value, list) else value)


def accuracy_rows(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """Name and interval of both runs, then of the floors, the better one first."""
    statistics = comparison["statistics"]
    runs = [{"name": name} | statistics[f"accuracy_{x}"] for name, x in zip(comparison["names"], "ab", strict=True)]
    floors = [{"name": floor["name"]} | floor["interval"] for floor in comparison["floors"] or []]
    return runs + sorted(floors, key=lambda floor: -floor["estimate"])


def settings_rows(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """{name, values, differs} of every setting, those that differ first."""
    ours, theirs = (_flat(settings) for settings in comparison["settings"])
    names = [name for name in dict.fromkeys([*ours, *theirs]) if name not in NOT_TRAINING_SETTINGS]
    rows = [{"name": name, "values": [side.get(name, "–") for side in (ours, theirs)]} for name in names]
    for row in rows:
        row["differs"] = row["values"][0] != row["values"][1]
    return sorted(rows, key=lambda row: not row["differs"])


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names, as they read in JSON."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            flat[prefix + name] = ", ".join(map(str, value))
        else:
            flat[prefix + name] = "–" if value is None else value
    return flat


def clearest_first(disagreements: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that the runs see most differently first, each with its runs' confidence in what they say."""

    def gap(item: dict[str, Any]) -> float:
        ours, theirs = item["probabilities"]
        return float(max(abs(x - y) for x, y in zip(ours, theirs, strict=True)))

    with_confidence = [
        item | {"confidence": [max(chances) for chances in item["probabilities"]]} for item in disagreements
    ]
    return sorted(with_confidence, key=gap, reverse=True)


def confusions(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """{label, predicted, counts} of every pair of classes that a run confused, the most frequent first."""
    classes, matrices = comparison["classes"], comparison["confusion_matrices"]
    pairs = [
        {"label": label, "predicted": predicted, "counts": [matrix[i][j] for matrix in matrices]}
        for i, label in enumerate(classes)
        for j, predicted in enumerate(classes)
        if i != j
    ]
    return sorted((pair for pair in pairs if any(pair["counts"])), key=lambda pair: -sum(pair["counts"]))
