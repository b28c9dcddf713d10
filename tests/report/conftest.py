"""Runs to compare, written without training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.run_folders import write_run

from app.runs.reader import Run, read_run


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
