"""The model card: what the model was trained on, how well it did, and how to use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.report.formats import markdown_environment
from app.settings import Settings


def write_model_card(
    path: Path,
    path_name: str,
    settings: Settings,
    model_commit: str | None,
    split: Mapping[str, Any],
    class_names: Sequence[str],
    metrics: Mapping[str, Any],
) -> None:
    """Writes `path` in the Hub's form: YAML front matter, then Markdown (after SetFit's model card)."""
    card = (
        markdown_environment()
        .get_template("model_card.md.j2")
        .render(
            path_name=path_name,
            settings=settings,
            model_commit=model_commit,
            split=split,
            class_names=class_names,
            metrics=metrics,
        )
    )
    path.write_text(card, encoding="utf-8")
