"""Write a comparison as comparison.json, comparison.md and comparison.html."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..common.files import write_json, write_text
from ..common.formats import MIB, render_template
from ..metrics.score import name_f1
from . import charts
from .explanation import differing_settings

# Name, key in comparison.json, format, unit. A key may be None in older runs.
SCORES = [
    ("test accuracy", "accuracy", ".4f", 1.0),
    ("F1", "f1", ".4f", 1.0),
    ("precision", "precision", ".4f", 1.0),
    ("recall", "recall", ".4f", 1.0),
    ("test loss", "loss", ".4f", 1.0),
]
COSTS = [
    ("ranks", "world_size", ".0f", 1.0),
    ("optimizer steps", "steps", ",.0f", 1.0),
    ("training time, s", "train_seconds", ",.1f", 1.0),
    ("rows per second", "train_examples_per_second", ",.1f", 1.0),
    ("tokens per second", "train_tokens_per_second", ",.0f", 1.0),
    ("padding, %", "padding_fraction", ".1f", 0.01),
    ("peak memory per rank, MiB", "peak_memory_bytes", ",.0f", MIB),
]


def write_comparison(comparison: dict[str, Any], folder: Path) -> None:
    """Write the result of `compare_runs` or `compare_seeds` in three formats into an existing folder."""
    markdown, page = as_markdown(comparison), as_html(comparison)
    write_json(folder / "comparison.json", comparison)
    write_text(folder / "comparison.html", page)
    write_text(folder / "comparison.md", markdown)


def as_markdown(comparison: dict[str, Any]) -> str:
    return render_template("comparison.md.j2", **_context(comparison))


def as_html(comparison: dict[str, Any]) -> str:
    """Render a comparison as a self-contained page, without scripts and without requests."""
    names, losses = comparison["names"], comparison["losses"]
    svg = {"losses": charts.loss_curves(losses[:1] if losses[0] == losses[1] else losses, names)}
    if comparison["first_differing_step"] is not None:
        svg["difference"] = charts.loss_difference(losses)
    return render_template("page.html.j2", plots=svg, **_context(comparison))


def _context(comparison: dict[str, Any]) -> dict[str, Any]:
    return {
        "comparison": comparison,
        "names": comparison["names"],
        "seeds": comparison.get("seeds"),
        "sides": (0,) if comparison["same_predictions"] else (0, 1),  # what is equal is shown once
        "headline": headline(comparison),
        "identity": identity(comparison),
        "scores": metric_rows(comparison, SCORES),
        "costs": metric_rows(comparison, COSTS),
        "settings": differing_settings(*comparison["settings"]),
        "misclassified": comparison["misclassified_by_both"],
        "disagreements": sorted(comparison["disagreements"], key=_difference_in_probability, reverse=True),
    }


# ---- template variables ----------------------------------------------------------------------------------------------


def headline(comparison: dict[str, Any]) -> str:
    """Return that the runs are identical, or from which step on they differ, and why."""
    if comparison["first_difference"] is None:
        return str(comparison["verdict"])
    step, cause = comparison["first_differing_step"], comparison["explanation"].removeprefix("trained differently: ")
    return f"Different {'after identical steps' if step is None else f'from step {step} on'}: {cause}"


def identity(comparison: dict[str, Any]) -> str:
    """Return what is bitwise identical, or the first difference, in a sentence or two."""
    steps, rows = comparison["common_steps"], comparison["runs"][0]["n_test"]
    sentence = (
        f"The losses and gradient norms of all {steps} steps, the predictions for all {rows} test rows and all weights "
        "are bitwise identical."
    )
    if comparison["first_difference"] is not None:
        sentence = f"First difference: {comparison['first_difference']}."
    elif not comparison["same_evaluations"]:
        sentence += " Only the evaluations during training differ, which are part of the hash."
    if "seeds" not in comparison:
        return sentence
    pairs = comparison["seeds"]["pairs"]
    identical = sum(pair["first_difference"] is None for pair in pairs)
    seed = comparison["settings"][0]["seed"]
    return f"Bitwise identical for {identical} of {len(pairs)} seeds. Seed {seed}: {sentence}"


def metric_rows(comparison: dict[str, Any], metrics: Sequence[tuple[str, str, str, float]]) -> list[dict[str, Any]]:
    """Return metrics of both runs, formatted, with their difference, which is A - B as everywhere in the report."""
    rows, classes = [], comparison["classes"]
    f1 = [*dict.fromkeys(name_f1(run["positive_class"], classes) for run in comparison["runs"])]
    for name, key, form, unit in metrics:
        # The memory is a list with a number per rank.
        values = [np.nan if run[key] is None else float(np.max(run[key])) / unit for run in comparison["runs"]]
        # Scores of different classes have no difference.
        difference = values[0] - values[1] if len(f1) == 1 or key not in ("f1", "precision", "recall") else np.nan
        rows.append(
            {
                "name": " and ".join(f1) if key == "f1" else name,
                "cells": [_format(value, form) for value in values],
                "difference": "=" if difference == 0 else _format(difference, "+z" + form).replace("-", "−"),
            }
        )
    return rows


def _format(value: float, form: str) -> str:
    return "–" if np.isnan(value) else format(value, form)


def _difference_in_probability(row: dict[str, Any]) -> float:
    return float(np.abs(np.subtract(*row["probabilities"])).max())
