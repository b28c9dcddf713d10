"""A comparison in words and tables: comparison.json and comparison.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.report.templates import markdown_environment
from app.run_record import write_json, write_text

MIB = 2**20


def write_comparison(comparison: dict[str, Any], folder: Path) -> str:
    """Writes the files into `folder` and returns the Markdown, which is also readable in a terminal."""
    markdown = as_markdown(comparison)
    write_json(folder / "comparison.json", comparison)
    write_text(folder / "comparison.md", markdown)
    return markdown


def as_markdown(comparison: dict[str, Any]) -> str:
    return (
        markdown_environment()
        .get_template("comparison.md.j2")
        .render(comparison=comparison, names=names(comparison), verdict=verdict(comparison), table=table(comparison))
    )


def names(comparison: dict[str, Any]) -> list[str]:
    """What to call the two runs: their roads, or their folders where they took the same one."""
    paths = [run["path"] for run in comparison["runs"]]
    return paths if paths[0] != paths[1] else [f"{letter} ({path})" for letter, path in zip("AB", paths, strict=True)]


def verdict(comparison: dict[str, Any]) -> str:
    """One sentence on whether the two were the same training."""
    a, b = comparison["runs"]
    if comparison["common_steps"] != max(a["steps"], b["steps"]):
        common = comparison["common_steps"]
        return f"The runs have {a['steps']} and {b['steps']} steps: only the first {common} can be compared."
    if comparison["first_differing_step"] is None and comparison["same_probabilities"]:
        return f"The same training: all {comparison['common_steps']} losses and all predictions are equal to the bit."
    if comparison["first_differing_step"] is None:
        return f"All {comparison['common_steps']} losses are equal to the bit; the predictions are not."
    return (
        f"Not the same training to the bit: the losses differ from step {comparison['first_differing_step']} on, by "
        f"{comparison['max_loss_difference']:.3g} at most."
    )


def table(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures side by side; a difference is the second run's less the first's."""

    def row(name: str, key: str, form: str, unit: float = 1.0) -> dict[str, Any]:
        values = [_largest(run[key]) / unit for run in comparison["runs"]]
        difference = values[1] - values[0]
        return {
            "name": name,
            "cells": [form.format(value) for value in values],
            "difference": "=" if difference == 0 else ("+" if difference > 0 else "−") + form.format(abs(difference)),
        }

    return [
        row("test accuracy", "accuracy", "{:.4f}"),
        row("F1", "f1", "{:.4f}"),
        row("test loss", "loss", "{:.6f}"),
        row("test rows", "n_test", "{:.0f}"),
        row("ranks", "world_size", "{:.0f}"),
        row("optimizer steps", "steps", "{:.0f}"),
        row("training seconds", "train_seconds", "{:.1f}"),
        row("examples a second", "train_examples_per_second", "{:.1f}"),
        row("peak memory of a rank, MiB", "peak_memory_bytes", "{:.0f}", MIB),
    ]


def _largest(value: Any) -> float:
    return float(max(value) if isinstance(value, list) else value)
