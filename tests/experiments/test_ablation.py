"""The variants of the ablation and the table of their effects."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.common.errors import UserError
from app.common.formats import render_template
from app.data.sampler import plan_batches
from app.experiments.ablation import (
    Outcome,
    Variant,
    build_variant_data,
    build_variants,
    measure_effect,
    repeat_padded_rows,
    run_ablation,
    variant_settings,
)
from app.settings import Settings


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (2, 1), (3, 4)])
def test_each_variant_changes_one_thing_and_no_two_change_the_same(ranks, accumulation):
    ours = asdict(Variant())
    changes = [
        {name for name, value in asdict(variant).items() if value != ours[name]}
        for variant in build_variants(ranks, accumulation).values()
    ]
    assert all(len(change) == 1 for change in changes)
    assert set.union(*changes) == set(ours)


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
    found = measure_effect(list(zip(ours, theirs, strict=True)), Variant(batch_factor=2))
    assert found["first_differing_steps"] == [None, 2]
    assert found["max_loss_difference"] == pytest.approx(0.3)
    assert found["mean_loss_difference"] == pytest.approx(0.3 / 4)
    assert found["accuracies"] == [0.75, 0.75]
    assert found["accuracy_difference"] == pytest.approx((0.25 + 0.5) / 2)
    assert found["interval"][0] < 0.375 < found["interval"][1]
    assert found["changed_rows"] == (1 + 4) / 2


def test_correct_repeated_rows_are_counted_twice_but_divided_by_the_number_of_rows():
    ours = outcome([0.7], [1, 1, 1, 1, 1, 1, 1, 1, 1])
    theirs = Outcome([0.7], repeat_padded_rows(ours.correct, 8))
    found = measure_effect([(ours, theirs)], Variant(counted_ranks=8))
    assert (found["counted_rows"], found["accuracies"]) == (16, [16 / 9]), "more correct predictions than rows"
    assert (found["first_differing_steps"], found["interval"], found["changed_rows"]) == ([None], None, None)


def test_a_nan_loss_is_left_blank_in_the_table():
    pair = (outcome([0.7, 0.6], [1, 0]), outcome([0.7, float("nan")], [0, 0]))
    found = measure_effect([pair], Variant(optimizer="Adam"))
    assert found["first_differing_steps"] == [2]
    assert found["max_loss_difference"] is None
    ablation = {
        "settings": {"train_batch_size": 32, "max_steps": 2, "num_train_epochs": 3.0},
        "ranks": 2,
        "seeds": [42],
        "n_test": 2,
        "baseline": {"accuracies": [0.5]},
        "differences": [{"name": "Adam"} | found],
    }
    (row,) = (
        line for line in render_template("ablation.md.j2", ablation=ablation).splitlines() if line.startswith("| Adam")
    )
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["Adam", "2", "–", "–", "0.00%", "−50.00", "1.0"]


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
