"""Read the reviews of one file."""

from __future__ import annotations

from pathlib import Path

from app.data.reviews import ReviewTable, clean
from app.data.sources import open_file


def read_reviews(
    path: Path,
    text_column: str = "review",
    label_column: str = "label",
    *,
    label_names: str | None = None,
    cache_dir: Path | None = None,
) -> ReviewTable:
    return clean({"train": open_file(path, cache_dir)}, (text_column, label_column), label_names=label_names)
