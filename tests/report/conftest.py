"""Runs to compare, written without training, and reviews that try to run scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from helpers.run_folders import write_run

from app.runs.reader import Run, read_run

SCRIPT = "<script>document.title='ran'</script>"
IMAGE = "<img src=x onerror=\"document.title='ran'\">"


@pytest.fixture
def make_pair(review_csv, tmp_path) -> Callable[..., tuple[Run, Run]]:
    """Write and read two runs, one of each training path: `make_pair(same=True, seed=1)`. Others differ in each step.

    The changed settings of both are keyword arguments, and those of one of them the mappings `a` and `b`.
    """

    def make(*, same=False, reviews=None, a=None, b=None, **settings) -> tuple[Run, Run]:
        folder, reviews = tmp_path / f"runs{settings.get('seed', '')}", reviews or review_csv()
        runs = []
        for number, (name, path, changes) in enumerate((("a", "ddp_loop", a), ("b", "trainer_run", b))):
            options = {"path": path, "rng_seed": 0 if same else number} | settings | (changes or {})
            runs.append(read_run(write_run(folder / name, reviews, **options)))
        return tuple(runs)

    return make


@pytest.fixture
def hostile(review_csv, tmp_path) -> Path:
    """A CSV whose reviews and classes contain active HTML and Markdown, and are too wide for a page."""
    reviews = pd.read_csv(review_csv(900))
    reviews["review"] += f" {SCRIPT}{IMAGE} | `code` [link](http://example.invalid) \x1b[31m" + "好" * 300 + "w" * 300
    reviews["label"] = reviews["label"].map({0: SCRIPT, 1: IMAGE + "x" * 80})
    reviews.to_csv(tmp_path / "hostile.csv", index=False)
    return tmp_path / "hostile.csv"
