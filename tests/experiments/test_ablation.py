"""The variants of the ablation and the table of their effects."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DistributedSampler

from app.experiments.ablation import Outcome, as_markdown, compare, records, summarize, train_variant
from app.experiments.variants import (
    BASELINE,
    PADDED_RANKS,
    Variant,
    build_variants,
    count_rows,
    rows_of_steps,
    variant_settings,
)
from app.settings import Settings
from app.training.build import build_data


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (2, 1), (4, 2)])
def test_each_variant_changes_one_thing_in_the_baseline_and_each_field_is_changed(ranks, accumulation):
    variants = build_variants(ranks, accumulation).values()
    differences = [dict(asdict(variant).items() ^ asdict(BASELINE).items()) for variant in variants]
    assert all(len(difference) == 1 for difference in differences)
    assert {name for difference in differences for name in difference} == set(asdict(Variant()))
    assert len(set(variants)) == len(variants)


@pytest.mark.parametrize("n", [8, 9, 99])
def test_padded_shards_are_those_of_distributed_sampler(n):
    shards = [DistributedSampler(range(n), PADDED_RANKS, rank, shuffle=False) for rank in range(PADDED_RANKS)]
    padded = count_rows(np.arange(n), Variant(counted="padded shards"), 2)
    assert sorted(padded) == sorted(row for shard in shards for row in shard)


def outcome(losses, correct, weights=(3.0, 4.0)):
    return Outcome(losses, np.array(correct, dtype=bool), torch.tensor(weights))


def effects_of(*pairs):
    """The effects of a change, from the outcomes of the baseline and of itself with each seed."""
    return summarize(pd.DataFrame([{"change": "it"} | compare(*pair, BASELINE, ranks=2) for pair in pairs]))


def test_the_effect_of_a_variant_is_its_mean_difference_from_the_baseline_over_seeds():
    first = outcome([0.7, 0.5, 0.4], [1, 1, 0, 0]), outcome([0.7, 0.5], [1, 1, 1, 0], (3.0, 4.5))
    second = outcome([0.7, 0.6, 0.5], [1, 0, 0, 0]), outcome([0.7, 0.9], [0, 1, 1, 1], (3.0, 6.5))
    (effect,) = effects_of(first, second).to_dict("records")
    assert effect["low"] < (0.25 + 0.5) / 2 < effect["high"]
    expected = {"first_differing_step": 2, "max_loss_difference": 0.3, "mean_loss_difference": 0.3 / 4}
    expected |= {"baseline_accuracy": 0.375, "accuracy": 0.75, "accuracy_difference": 0.375, "changed_rows": 2.5}
    expected |= {"final_weight_difference": 0.5}  # the largest, relative to the baseline
    assert {name: effect[name] for name in expected} == pytest.approx(expected)


def test_what_is_unknown_is_blank_in_the_table_and_null_in_the_file():
    effects = effects_of((outcome([0.7, 0.6], [1, 0]), outcome([0.7, float("nan")], [0, 0])))
    (line,) = [line for line in as_markdown(effects).splitlines() if line.startswith("| it ")]
    assert [cell.strip() for cell in line.split("|")[2:5]] == ["2", "–", "–"]
    assert "Baseline: this project's training, with a test accuracy of 50.00%." in as_markdown(effects)
    (record,) = records(effects)
    assert (record["max_loss_difference"], record["low"]) == (None, None)


class Small:
    """Trainings of 2 ranks, with 3 steps in each of 3 epochs, without dropout."""

    def __init__(self, csv, cache, world) -> None:
        flags = {"csv": str(csv), "cache_dir": str(cache), "threads": 1, "max_length": 16, "train_batch_size": 16}
        self.settings = variant_settings(Settings(**flags, num_train_epochs=3, learning_rate=1e-3), BASELINE, 2)
        self.data, self.world = build_data(self.settings, world), world
        assert (self.data.plan.steps_per_epoch, self.data.plan.epochs) == (3, 3)

    def rows(self, rows):
        """Return the rows of each step: `small.rows("divided")`."""
        return rows_of_steps(self.settings, Variant(rows=rows), self.data)

    def train(self, *variants):
        return [train_variant(self.settings, variant, self.data, ranks=2, world=self.world) for variant in variants]


@pytest.fixture
def small(world, review_csv, tmp_path):
    return Small(review_csv(60), tmp_path / "cache", world)


def test_forgetting_set_epoch_repeats_the_order_of_the_first_epoch(small):
    ours, theirs = small.rows("divided"), small.rows("same order in each epoch")
    assert np.array_equal(theirs, np.tile(ours[:3], (3, 1)))
    assert not np.array_equal(ours[3:6], ours[:3])


def test_without_a_sampler_each_rank_trains_on_all_rows_and_an_epoch_takes_twice_the_steps(small):
    train, rows = small.data.split.train, small.rows("same on each rank")
    assert np.array_equal(rows[:, :8], rows[:, 8:])
    assert len(rows) == 3 * (len(train) // 8) == 3 * 6
    for epoch in np.split(rows[:, :8].ravel(), 3):
        assert len(set(epoch)) == len(epoch), "each row once"
        assert set(epoch) <= set(train)


def test_the_ranks_own_splits_train_on_rows_that_rank_0_tests(small):
    test, ours, theirs = small.data.split.test, small.rows("divided"), small.rows("own split of each rank")
    assert not np.isin(test, ours).any()
    assert np.array_equal(ours[:, :8], theirs[:, :8]), "rank 0 has the baseline's split"
    assert np.isin(test, theirs[:, 8:]).any(), "rank 1 trains on test rows of rank 0"
    trained = small.train(BASELINE, Variant(rows="own split of each rank"))
    assert [outcome.trained_test_rows for outcome in trained] == [0, np.isin(test, theirs).mean()]
    assert trained[0].losses[0] != trained[1].losses[0]
