"""Trainings with skipped synchronization, with one rank."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from app.bench import sections
from app.bench.sections import convergence, describe_difference
from app.common.errors import AgreedError

NAMES = ["every one", "every 2", "every 2, lr × 2", "every 4", "every 4, lr × 4", "every 8", "every 8, lr × 8"]


@pytest.fixture
def variants_of(monkeypatch, make_lab):
    """Return a function that runs the section without its trainings, and returns their settings and the page."""

    def run(**changes):
        seen = {}

        def train(settings, data, world):
            key = settings.gradient_accumulation_steps, settings.learning_rate
            seen[key] = settings
            return 0.5, [1.0] * settings.max_steps

        monkeypatch.setattr(sections, "train", train)
        lab = make_lab(**changes)
        convergence(lab)
        return list(seen.values()), lab.page

    return run


def test_a_seed_that_is_too_large_is_a_mistake(make_lab):
    lab = make_lab(seed=2**31 - 1, max_steps=2)
    lab.seeds = 2
    with pytest.raises(AgreedError, match="--seed"):
        convergence(lab)


def test_all_variants_of_skipped_synchronization_see_the_same_rows(variants_of):
    trained, page = variants_of(strategy="zero2", learning_rate=1e-4)
    assert list(page.numbers["losses"]) == NAMES
    assert {v.train_batch_size * v.max_steps for v in trained} == {160 * 8}
    assert {v.train_batch_size // v.gradient_accumulation_steps for v in trained} == {8}
    assert [round(v.learning_rate / 1e-4) for v in trained] == [1, 1, 2, 1, 4, 1, 8]
    assert {v.strategy for v in trained} == {"ddp"}
    trained, _ = variants_of(max_steps=20)
    assert [v.max_steps for v in trained] == [16, 8, 8, 4, 4, 2, 2], "a multiple of the longest interval"
    assert list(variants_of(train_batch_size=30)[1].numbers["losses"]) == NAMES[:3]


def test_one_exchange_per_micro_batch_is_ordinary_training(make_lab):
    lab = make_lab(max_steps=8)
    convergence(lab)
    losses = {name: of_seeds[0] for name, of_seeds in lab.page.numbers["losses"].items()}
    assert [len(of_steps) for of_steps in losses.values()] == [8, 4, 4, 2, 2, 1, 1]
    assert losses["every 2"][0] == pytest.approx(np.mean(losses["every one"][:2]), rel=0.05), "the same rows"


def test_differences_of_accuracies_are_paired():
    frame = pd.DataFrame({"a": [0.80, 0.82, 0.84], "same": [0.80, 0.82, 0.84], "b": [0.70, 0.71, 0.75]})
    assert (describe_difference(frame, "a"), describe_difference(frame, "same")) == ("", "+0.00")
    assert describe_difference(frame, "b").startswith("−10.00 [−1")
    assert describe_difference(frame.iloc[:1], "b") == "−10.00"
