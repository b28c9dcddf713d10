"""Runs to compare, written without training, and reviews that try to run scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from helpers.jobs import write_reviews
from helpers.run_folders import write_run

from app.runs.reader import Run, read_run

SCRIPT = "<script>document.title='ran'</script>"
IMAGE = "<img src=x onerror=\"document.title='ran'\">"


def pair_of(folder: Path, reviews: Path, *, same=False, a=None, b=None, **settings) -> tuple[Run, Run]:
    """Write and read two runs, one of each training path. They differ in each step unless they are the same.

    The changed settings of both are keyword arguments, and those of one of them the mappings `a` and `b`.
    """
    runs = []
    for number, (name, path, changes) in enumerate((("a", "ddp_loop", a), ("b", "trainer_run", b))):
        options = {"path": path, "rng_seed": 0 if same else number} | settings | (changes or {})
        runs.append(read_run(write_run(folder / name, reviews, **options)))
    return tuple(runs)


@pytest.fixture
def make_pair(review_csv, tmp_path) -> Callable[..., tuple[Run, Run]]:
    """`pair_of` in the test's folder: `make_pair(same=True, seed=1)`."""

    def make(*, reviews=None, **options) -> tuple[Run, Run]:
        return pair_of(tmp_path / f"runs{options.get('seed', '')}", reviews or review_csv(), **options)

    return make


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    """A CSV whose reviews and classes contain active HTML and Markdown, and are too wide for a page."""
    path = tmp_path_factory.mktemp("hostile") / "hostile.csv"
    write_reviews(path, 900)
    reviews = pd.read_csv(path)
    reviews["review"] += f" {SCRIPT}{IMAGE} | `code` [link](http://example.invalid) \x1b[31m" + "好" * 300 + "w" * 300
    reviews["label"] = reviews["label"].map({0: SCRIPT, 1: IMAGE + "x" * 80})
    reviews.to_csv(path, index=False)
    return path
