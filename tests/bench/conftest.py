"""A laboratory of one rank, whose measurements are as short as possible."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from app.bench import core
from app.bench.core import Lab, Page
from app.settings import Settings
from app.training.build import build_data


@pytest.fixture
def make_lab(review_csv, tmp_path, monkeypatch, world) -> Callable[..., Lab]:
    """Return a function that makes a laboratory from changed settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(core, "ROUNDS", 1)
    monkeypatch.setattr(core, "FEWEST_ROUNDS", 1)

    def make(**changes) -> Lab:
        small = {"csv": str(review_csv(90)), "max_length": 16, "train_batch_size": 8, "disable_tqdm": True}
        settings = Settings(**small | changes)
        return Lab(
            page=Page("Laboratory", {}, tmp_path),
            settings=settings,
            world=world,
            data=build_data(settings, world),
            seconds=0.001,
            seeds=1,
        )

    return make
