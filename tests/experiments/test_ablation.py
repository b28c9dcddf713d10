"""The variants of the ablation and the table of their effects."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from helpers.marks import slow_after
from hypothesis import given
from hypothesis import strategies as st

from app.common.errors import UserError
from app.common.formats import render_template
from app.data.sampler import plan_batches
from app.experiments.ablation.page import Pair, measure_effect, pair_outcomes, run_ablation
from app.experiments.ablation.rows import build_variant_data, count_rows, repeat_padded_rows, rows_of_steps
from app.experiments.ablation.training import Outcome, train_variant
from app.experiments.ablation.variants import BASELINE, Variant, build_changes, name_baseline, variant_settings
from app.settings import Settings


def fields_that_differ(a, b):
    return {name for name, value in asdict(a).items() if value != asdict(b)[name]}


@pytest.mark.parametrize(("ranks", "accumulation"), [(2, 1), (4, 2)])
def test_each_variant_changes_one_thing_in_its_baseline_and_each_field_is_changed(ranks, accumulation):
    changes, left_out = build_changes(ranks, accumulation, 2)
    assert not left_out
    differences = [fields_that_differ(change.variant, change.baseline) for change in changes]
    assert all(len(difference) == 1 for difference in differences)
    assert set.union(*differences) == set(asdict(Variant()))
    assert len({change.name for change in changes}) == len({change.variant for change in changes}) == len(changes)


def test_averaged_parameters_are_compared_with_the_averaged_gradients_of_the_same_optimizer():
    averaging = [change for change in build_changes(2, 1, 2)[0] if change.variant.averaging_interval]
    assert [change.variant.averaging_interval for change in averaging] == [1, 10, 1, 10, 1, 10]
    for change in averaging:
        assert change.baseline == replace(change.variant, averaging_interval=0)
        # A rank that averages parameters could clip only its own gradients.
        assert variant_settings(Settings(), change.baseline, 2).max_grad_norm == 0
        assert name_baseline(change.baseline).startswith(change.name.partition(":")[0] + ", without decay")


@pytest.mark.parametrize(
    ("ranks", "epochs", "reasons"), [(2, 1, {"epoch"}), (1, 2, {"rank"}), (1, 1, {"epoch", "rank"})]
)
def test_changes_that_cannot_show_are_left_out_with_a_reason(ranks, epochs, reasons):
    changes, left_out = build_changes(ranks, 1, epochs)
    everything = {change.name for change in build_changes(ranks, 1, 2)[0]} | set(build_changes(ranks, 1, 2)[1])
    assert {change.name for change in changes} | set(left_out) == everything
    assert ("set_epoch" in str(list(left_out))) == (epochs == 1)
    assert {
        word for word in ("epoch", "rank") if f"in 1 {word}" in str(left_out) or f"with 1 {word}" in str(left_out)
    } == reasons
    assert all(change.variant.averaging_interval == 0 for change in changes) == (ranks == 1)


@given(st.integers(8, 99), st.integers(1, 8))
def test_padded_shards_contain_each_row_once_and_the_first_rows_again(n, ranks):
    rows = np.arange(n)
    padded = repeat_padded_rows(rows, ranks)
    extra = -n % ranks
    assert sorted(padded) == sorted([*rows, *rows[:extra]])


def outcome(losses, correct):
    return Outcome(losses, np.array(correct, dtype=bool))


def test_the_effect_of_a_variant_is_its_mean_difference_from_the_baseline_over_seeds():
    ours = [outcome([0.7, 0.5, 0.4], [1, 1, 0, 0]), outcome([0.7, 0.6, 0.5], [1, 0, 0, 0])]
    theirs = [outcome([0.7, 0.5], [1, 1, 1, 0]), outcome([0.7, 0.9], [0, 1, 1, 1])]
    pairs = [Pair(*outcomes, early, 0.5) for *outcomes, early in zip(ours, theirs, (0.25, 0.125), strict=True)]
    found = measure_effect(pairs, Variant(batch_factor=2))
    assert found["first_differing_steps"] == [None, 2]
    assert found["max_loss_difference"] == pytest.approx(0.3)
    assert found["mean_loss_difference"] == pytest.approx(0.3 / 4)
    assert found["accuracies"] == [0.75, 0.75]
    assert found["accuracy_difference"] == pytest.approx((0.25 + 0.5) / 2)
    assert found["interval"][0] < 0.375 < found["interval"][1]
    assert found["changed_rows"] == (1 + 4) / 2
    assert (found["early_weight_difference"], found["final_weight_difference"]) == (0.25, 0.5), "the largest"


def test_correct_repeated_rows_are_counted_twice_but_divided_by_the_number_of_rows():
    ours = outcome([0.7], [1, 1, 1, 1, 1, 1, 1, 1, 1])
    variant = Variant(counted_ranks=8)
    found = measure_effect([pair_outcomes(ours, ours, variant, ranks=2)], variant)
    assert (found["counted_rows"], found["accuracies"]) == (16, [16 / 9]), "more correct predictions than rows"
    assert (found["first_differing_steps"], found["interval"], found["changed_rows"]) == ([None], None, None)


def test_correct_rows_of_one_rank_are_divided_by_the_rows_of_all():
    ours = outcome([0.7], [1, 0, 1, 1, 1])
    variant = Variant(counts_rank_0_only=True)
    found = measure_effect([pair_outcomes(ours, ours, variant, ranks=2)], variant)
    assert (found["counted_rows"], found["accuracies"], found["changed_rows"]) == (3, [3 / 5], None)
    assert count_rows(ours.correct, Variant(), 2).tolist() == ours.correct.tolist()


def test_weights_are_compared_relative_to_the_baseline_unless_they_belong_to_other_models_or_are_missing():
    ours = replace(outcome([0.7], [1]), early_weights=torch.tensor([3.0, 4.0]), weights=torch.tensor([0.0, 2.0]))
    theirs = replace(ours, early_weights=torch.tensor([3.0, 4.5]), weights=torch.tensor([1.0, 2.0]))
    pair = pair_outcomes(ours, theirs, Variant(), ranks=2)
    assert (pair.early, pair.end) == (0.1, 0.5)
    assert {pair.baseline.early_weights, pair.baseline.weights, pair.changed.weights} == {None}, "no longer needed"
    pair = pair_outcomes(ours, replace(ours, early_weights=None, weights=torch.ones(3)), Variant(), ranks=2)
    assert (pair.early, pair.end) == (None, None)
    found = measure_effect([pair], Variant())
    assert (found["early_weight_difference"], found["final_weight_difference"]) == (None, None)


def test_a_nan_loss_is_left_blank_in_the_table():
    outcomes = outcome([0.7, 0.6], [1, 0]), outcome([0.7, float("nan")], [0, 0])
    found = measure_effect([Pair(*outcomes, 0.0, float("nan"))], Variant(optimizer="Adam"))
    assert found["first_differing_steps"] == [2]
    assert found["max_loss_difference"] is None
    ablation = {
        "settings": {"train_batch_size": 32, "max_steps": 2, "num_train_epochs": 3.0},
        "ranks": 2,
        "seeds": [42],
        "n_test": 2,
        "early_step": 10,
        "baselines": {"ours": {"accuracies": [0.5]}, "others": {"accuracies": [0.25]}},
        "differences": [
            {"name": "Adam", "baseline": "ours"} | found,
            {"name": "SGD", "baseline": "others"} | found | {"trained_test_rows": 0.4},
        ],
        "left_out": {"set_epoch": "it cannot show"},
    }
    lines = render_template("ablation.md.j2", ablation=ablation).splitlines()
    cells = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in lines
        if line[:1] == "|"
    }
    assert cells["Adam"] == ["2", "–", "–", "0", "–", "0.00%", "−50.00", "1.0"]
    assert cells["SGD"][-1] == "1.0; 40.0% of the test rows were trained on"
    assert [line for line in lines if line.startswith("Baseline: ")] == [
        "Baseline: ours, with a test accuracy of 50.00%.",
        "Baseline: others, with a test accuracy of 25.00%.",
    ]
    assert lines[-1] == "- set_epoch: it cannot show"


@pytest.mark.parametrize("validation_size", [0.0, 0.3])
def test_both_split_functions_select_the_same_number_of_rows(world, review_csv, tmp_path, validation_size):
    settings = Settings(
        csv=str(review_csv(90)), validation_size=validation_size, max_length=16, cache_dir=str(tmp_path / "cache")
    )
    ours, theirs = (
        build_variant_data(settings, Variant(split=name), world).split
        for name in ("scikit-learn, stratified", "datasets, not stratified")
    )
    for part in ("train", "validation", "test"):
        assert len(getattr(ours, part)) == len(getattr(theirs, part)), part
    assert sorted(np.concatenate([theirs.train, theirs.validation, theirs.test])) == list(range(90))
    assert ours.test.tolist() != theirs.test.tolist()


def test_adamw_without_decay_is_adam():
    settings = variant_settings(Settings(), Variant(optimizer="Adam"), ranks=2)
    assert (settings.weight_decay, settings.lr_scheduler_type) == (0.0, "constant")
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 77)) for _ in range(2))
    optimizers = (
        torch.optim.AdamW([ours], lr=0.1, weight_decay=settings.weight_decay, fused=True),
        torch.optim.Adam([theirs], lr=0.1, fused=True),
    )
    for step in range(1, 4):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = torch.sin(step * torch.arange(77.0))
            optimizer.step()
    assert torch.equal(ours, theirs)


def test_a_variant_that_cannot_be_trained_is_reported_before_anything_is_trained(review_csv, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # set by the process group of an earlier test
        monkeypatch.delenv(name, raising=False)
    settings = Settings(csv=str(review_csv(60)), train_batch_size=40, output_dir=str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"batch size per rank, 4 ranks instead of 2: .*--train_batch_size 80"):
        run_ablation(settings, 2, 1)
    assert not (tmp_path / "out").exists()


def test_a_variant_with_more_ranks_keeps_a_batch_size_per_rank():
    settings = variant_settings(Settings(per_device_train_batch_size=4), Variant(batch_factor=2), 2)
    plan = plan_batches(settings, 100, 1)
    assert (plan.logical_ranks, plan.micro_size, plan.global_size) == (4, 4, 16)


@pytest.fixture
def small(world, review_csv, tmp_path):
    """Settings of 2 ranks, and the data with the plan of 3 steps in each of 3 epochs, without dropout."""
    settings = Settings(
        csv=str(review_csv(60)),
        train_batch_size=16,
        max_length=16,
        num_train_epochs=3,
        learning_rate=1e-3,
        threads=1,
        cache_dir=str(tmp_path / "cache"),
    )
    settings = variant_settings(settings, BASELINE, 2)
    data = build_variant_data(settings, BASELINE, world)
    assert (data.plan.steps_per_epoch, data.plan.epochs) == (3, 3)
    return settings, data


def epochs_of(rows, steps_per_epoch=3):
    return [sorted(epoch.ravel()) for epoch in np.split(rows, range(steps_per_epoch, len(rows), steps_per_epoch))]


def test_forgetting_set_epoch_repeats_the_order_of_the_first_epoch(small):
    settings, data = small
    ours, theirs = (
        rows_of_steps(settings, Variant(rows=rows), data) for rows in ("divided", "same order in each epoch")
    )
    assert np.array_equal(theirs[:3], ours[:3])
    assert np.array_equal(theirs, np.tile(ours[:3], (3, 1)))
    assert not np.array_equal(ours[3:6], ours[:3])


def test_without_a_sampler_each_rank_trains_on_all_rows_and_an_epoch_takes_twice_the_steps(small):
    settings, data = small
    rows = rows_of_steps(settings, Variant(rows="same on each rank"), data)
    assert np.array_equal(rows[:, :8], rows[:, 8:])
    steps = len(data.split.train) // 8
    assert len(rows) == 3 * steps == 3 * 6
    for epoch in epochs_of(rows[:, :8], steps):
        assert len(set(epoch)) == steps * 8, "each row once"
        assert set(epoch) <= set(data.split.train)


def test_the_ranks_own_splits_train_on_rows_that_rank_0_tests(small):
    settings, data = small
    ours, theirs = (rows_of_steps(settings, Variant(rows=rows), data) for rows in ("divided", "own split of each rank"))
    assert not np.isin(data.split.test, ours).any()
    assert np.array_equal(ours[:, :8], theirs[:, :8]), "rank 0 has the baseline's split"
    assert not np.isin(data.split.test, theirs[:, :8]).any()
    assert np.isin(data.split.test, theirs[:, 8:]).any(), "rank 1 trains on test rows of rank 0"


def train(settings, variant, data, world):
    return train_variant(settings, variant, data, ranks=2, world=world)


@pytest.mark.parametrize(
    ("optimizer", "is_equal"),
    slow_after(1, [("Adam, not clipped", False), ("SGD, not clipped", True), ("SGD with momentum, not clipped", True)]),
)
def test_averaging_parameters_after_each_step_is_averaging_gradients_if_the_optimizer_is_linear_in_them(
    small, world, optimizer, is_equal
):
    settings, data = small
    settings = replace(settings, gradient_accumulation_steps=2, max_steps=12)
    baseline = Variant(optimizer=optimizer)
    expected = train(settings, baseline, data, world)
    each_step, rarely = (
        pair_outcomes(expected, train(settings, variant, data, world), variant, ranks=2)
        for variant in (replace(baseline, averaging_interval=interval) for interval in (1, 10))
    )
    # Rounding errors of fp32 are about 6e-8 per step.
    assert (each_step.early < 1e-6) == is_equal, each_step.early
    assert is_equal or each_step.early > 1e-3
    assert rarely.early > 1e-5, "an optimizer that trains alone for 10 steps takes another way"
    assert each_step.baseline.losses[0] == pytest.approx(each_step.changed.losses[0], abs=1e-6)


def test_the_share_of_test_rows_that_were_trained_on_is_measured(small, world):
    settings, data = small
    settings = replace(settings, max_steps=2)
    variant = Variant(rows="own split of each rank")
    rows = rows_of_steps(settings, variant, replace(data, plan=plan_batches(settings, len(data.split.train), 1)))
    ours, theirs = (train(settings, v, data, world) for v in (BASELINE, variant))
    assert (ours.trained_test_rows, theirs.trained_test_rows) == (0, np.isin(data.split.test, rows).mean())
    assert ours.losses[0] != theirs.losses[0]
