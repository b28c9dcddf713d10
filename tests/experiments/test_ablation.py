"""The variants of the ablation and the table of their effects."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.marks import slow_after
from hypothesis import given
from hypothesis import strategies as st

from app.data.sampler import plan_batches
from app.experiments.ablation import Outcome, as_markdown, compare, records, summarize, train_variant
from app.experiments.variants import (
    BASELINE,
    PADDED_RANKS,
    Variant,
    baseline_of,
    build_variants,
    count_rows,
    rows_of_steps,
    variant_settings,
)
from app.settings import Settings
from app.training.build import build_data


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (2, 1), (4, 2)])
def test_each_variant_changes_one_thing_in_its_baseline_and_each_field_is_changed(ranks, accumulation):
    variants = build_variants(ranks, accumulation).values()
    differences = [dict(asdict(variant).items() ^ asdict(baseline_of(variant)[1]).items()) for variant in variants]
    assert all(len(difference) == 1 for difference in differences)
    assert {name for difference in differences for name in difference} == set(asdict(Variant()))
    assert len(set(variants)) == len(variants)


def test_averaged_parameters_are_compared_with_the_averaged_gradients_of_the_same_optimizer():
    averaging = [variant for variant in build_variants(2, 1).values() if variant.averaged == "parameters"]
    assert len(averaging) == 3
    for variant in averaging:
        baseline = baseline_of(variant)[1]
        assert baseline == replace(variant, averaged="gradients")
        settings = variant_settings(Settings(), baseline, 2)
        # A rank that averages parameters could clip only its own gradients. AdamW without decay is Adam.
        found = (settings.max_grad_norm, settings.weight_decay, settings.lr_scheduler_type)
        assert found == (0.0, 0.0, "constant")


@given(st.integers(8, 99))
def test_padded_shards_contain_each_row_once_and_the_first_rows_again(n):
    rows = np.arange(n)
    padded = count_rows(rows, Variant(counted="padded shards"), 2)
    assert sorted(padded) == sorted([*rows, *rows[: -n % PADDED_RANKS]])


def outcome(losses, correct, weights=(3.0, 4.0)):
    return Outcome(losses, np.array(correct, dtype=bool), torch.tensor(weights))


def effects_of(*pairs):
    """The effects of a change, from the outcomes of its baseline and of itself with each seed."""
    names = {"baseline": "ours", "change": "it"}
    return summarize(pd.DataFrame([names | compare(*pair, BASELINE, ranks=2) for pair in pairs]))


def test_the_effect_of_a_variant_is_its_mean_difference_from_the_baseline_over_seeds():
    first = outcome([0.7, 0.5, 0.4], [1, 1, 0, 0]), outcome([0.7, 0.5], [1, 1, 1, 0], (3.0, 4.5))
    second = outcome([0.7, 0.6, 0.5], [1, 0, 0, 0]), outcome([0.7, 0.9], [0, 1, 1, 1], (3.0, 6.5))
    (effect,) = effects_of(first, second).to_dict("records")
    assert effect["low"] < (0.25 + 0.5) / 2 < effect["high"]
    expected = {"first_differing_step": 2, "max_loss_difference": 0.3, "mean_loss_difference": 0.3 / 4}
    expected |= {"baseline_accuracy": 0.375, "accuracy": 0.75, "accuracy_difference": 0.375, "changed_rows": 2.5}
    expected |= {"final_weight_difference": 0.5}  # the largest, relative to the baseline
    assert {name: effect[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("counted", "correct", "rows", "accuracy"),
    [
        ("padded shards", [1] * 9, 16, 16 / 9),  # more correct predictions than rows
        ("rank 0 only", [1, 0, 1, 1, 1], 3, 3 / 5),
    ],
)
def test_correct_rows_count_as_the_variant_does_but_are_divided_by_the_number_of_rows(counted, correct, rows, accuracy):
    ours = outcome([0.7], correct)
    effect = compare(ours, ours, Variant(counted=counted), ranks=2)
    assert (effect["counted_rows"], effect["accuracy"]) == (rows, accuracy)


def test_what_is_unknown_is_blank_in_the_table_and_null_in_the_file():
    effects = effects_of((outcome([0.7, 0.6], [1, 0]), outcome([0.7, float("nan")], [0, 0])))
    (line,) = [line for line in as_markdown(effects).splitlines() if line.startswith("| it ")]
    assert [cell.strip() for cell in line.split("|")[2:5]] == ["2", "–", "–"]
    assert "Baseline: ours, with a test accuracy of 50.00%." in as_markdown(effects)
    (record,) = records(effects)
    assert (record["max_loss_difference"], record["low"]) == (None, None)


@pytest.fixture
def small(world, review_csv, tmp_path):
    """Settings of 2 ranks, and the data with the plan of 3 steps in each of 3 epochs, without dropout."""
    flags = {"csv": str(review_csv(60)), "cache_dir": str(tmp_path / "cache"), "threads": 1, "max_length": 16}
    flags |= {"train_batch_size": 16, "num_train_epochs": 3, "learning_rate": 1e-3}
    settings = variant_settings(Settings(**flags), BASELINE, 2)
    data = build_data(settings, world)
    assert (data.plan.steps_per_epoch, data.plan.epochs) == (3, 3)
    return settings, data


@pytest.fixture
def rows_of(small):
    """A function that returns the rows of each step: `rows_of("divided")`."""
    settings, data = small
    return lambda rows: rows_of_steps(settings, Variant(rows=rows), data)


def test_forgetting_set_epoch_repeats_the_order_of_the_first_epoch(rows_of):
    ours, theirs = rows_of("divided"), rows_of("same order in each epoch")
    assert np.array_equal(theirs, np.tile(ours[:3], (3, 1)))
    assert not np.array_equal(ours[3:6], ours[:3])


def test_without_a_sampler_each_rank_trains_on_all_rows_and_an_epoch_takes_twice_the_steps(small, rows_of):
    train, rows = small[1].split.train, rows_of("same on each rank")
    assert np.array_equal(rows[:, :8], rows[:, 8:])
    assert len(rows) == 3 * (len(train) // 8) == 3 * 6
    for epoch in np.split(rows[:, :8].ravel(), 3):
        assert len(set(epoch)) == len(epoch), "each row once"
        assert set(epoch) <= set(train)


def test_the_ranks_own_splits_train_on_rows_that_rank_0_tests(small, rows_of):
    test, ours, theirs = small[1].split.test, rows_of("divided"), rows_of("own split of each rank")
    assert not np.isin(test, ours).any()
    assert np.array_equal(ours[:, :8], theirs[:, :8]), "rank 0 has the baseline's split"
    assert np.isin(test, theirs[:, 8:]).any(), "rank 1 trains on test rows of rank 0"


def train(settings, variant, data, world):
    return train_variant(settings, variant, data, ranks=2, world=world)


@pytest.mark.parametrize(
    ("optimizer", "is_equal"), slow_after(1, [("Adam, not clipped", False), ("SGD", True), ("SGD with momentum", True)])
)
def test_averaging_parameters_after_each_step_is_averaging_gradients_if_the_optimizer_is_linear_in_them(
    small, world, optimizer, is_equal
):
    settings, data = small
    settings = replace(settings, gradient_accumulation_steps=2, max_steps=12)
    baseline = Variant(optimizer=optimizer)
    variant = replace(baseline, averaged="parameters")
    effect = compare(*(train(settings, v, data, world) for v in (baseline, variant)), variant, ranks=2)
    # Rounding errors of fp32 are about 6e-8 per step.
    assert (effect["final_weight_difference"] < 1e-6) == is_equal, effect
    assert is_equal or effect["final_weight_difference"] > 1e-3


def test_the_share_of_test_rows_that_were_trained_on_is_measured(small, world):
    settings, data = small
    settings = replace(settings, max_steps=2)
    variant = Variant(rows="own split of each rank")
    rows = rows_of_steps(settings, variant, replace(data, plan=plan_batches(settings, len(data.split.train), 1)))
    ours, theirs = (train(settings, v, data, world) for v in (BASELINE, variant))
    assert (ours.trained_test_rows, theirs.trained_test_rows) == (0, np.isin(data.split.test, rows).mean())
    assert ours.losses[0] != theirs.losses[0]
