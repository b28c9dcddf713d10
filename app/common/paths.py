"""Paths of files that belong to this project."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DOWNLOADED_CSV = REPOSITORY / "data" / "ChnSentiCorp_htl_all.csv"
SAMPLE_CSV = REPOSITORY / "data" / "sample_reviews.csv"
