"""Trainings with compressed gradients and with skipped synchronization, with one rank."""

from __future__ import annotations

import numpy as np
import pytest

from app.bench import trainings
from app.bench.trainings import accuracies, compression, convergence
from app.common.errors import AgreedError

HOOKS = ["no", "fp16", "bf16", "power_sgd"]
NAMES = ["every one", "every 2", "every 2, lr × 2", "every 4", "every 4, lr × 4", "every 8", "every 8, lr × 8"]


@pytest.fixture
def variants_of(monkeypatch, make_lab):
    """Return a function that runs a section without its trainings, and returns their settings and the page."""

    def run(section, **changes):
        seen = {}

        def train(settings, data, world):
            key = settings.ddp_comm_hook, settings.gradient_accumulation_steps, settings.learning_rate
            seen[key] = settings
            return 0.5, [1.0] * settings.max_steps

        monkeypatch.setattr(trainings, "train", train)
        lab = make_lab(**changes)
        section(lab)
        return list(seen.values()), lab.page

    return run


def test_all_hooks_are_measured_and_trained_with_the_same_seeds(make_lab):
    lab = make_lab(max_steps=4)
    lab.seeds = 2
    compression(lab)
    measured = lab.page.numbers["accuracies"]
    assert list(measured) == HOOKS
    assert all(len(values) == 2 and 0 <= min(values) <= max(values) <= 1 for values in measured.values())
    assert lab.page.numbers["bytes_sent_per_step"] == dict.fromkeys(HOOKS, 0.0), "with one rank, nothing is sent"
    again = make_lab(max_steps=4)
    compression(again)
    assert again.page.numbers["accuracies"] == {hook: values[:1] for hook, values in measured.items()}


@pytest.mark.parametrize(
    ("change", "strategy", "reason"),
    [
        ({}, "ddp", ""),
        ({"strategy": "zero1", "ddp_comm_hook": "bf16"}, "zero1", ""),
        ({"strategy": "zero3", "cpu_offload": True}, "ddp", ""),
        ({"precision": "fp16"}, "ddp", "power_sgd is left out: --ddp_comm_hook power_sgd: an overflow in fp16"),
        ({"ddp_find_unused_parameters": True}, "ddp", "--ddp_find_unused_parameters"),
    ],
)
def test_a_hook_is_left_out_if_the_settings_exclude_it(variants_of, change, strategy, reason):
    trained, page = variants_of(compression, max_steps=2, **change)
    assert [settings.ddp_comm_hook for settings in trained] == (HOOKS[:3] if reason else HOOKS)
    assert {(settings.strategy, settings.cpu_offload) for settings in trained} == {(strategy, False)}
    assert reason in " ".join(page.text[1].split()) if reason else "left out" not in "".join(page.text)


def test_a_training_with_a_hook_is_short_unless_its_length_is_given(variants_of):
    assert {settings.max_steps for settings in variants_of(compression)[0]} == {60}, "6 epochs of 10 steps"
    assert {settings.max_steps for settings in variants_of(compression, num_train_epochs=100)[0]} == {150}
    assert {settings.max_steps for settings in variants_of(compression, max_steps=200)[0]} == {200}


def test_a_seed_that_is_too_large_is_a_mistake(make_lab):
    lab = make_lab(seed=2**31 - 1, max_steps=2)
    lab.seeds = 2
    with pytest.raises(AgreedError, match="--seed"):
        convergence(lab)


def test_all_variants_of_skipped_synchronization_see_the_same_rows(variants_of):
    trained, page = variants_of(convergence, strategy="zero2", learning_rate=1e-4)
    assert list(page.numbers["losses"]) == NAMES
    assert {v.train_batch_size * v.max_steps for v in trained} == {160 * 8}
    assert {v.train_batch_size // v.gradient_accumulation_steps for v in trained} == {8}
    assert [round(v.learning_rate / 1e-4) for v in trained] == [1, 1, 2, 1, 4, 1, 8]
    assert {v.strategy for v in trained} == {"ddp"}
    trained, _ = variants_of(convergence, max_steps=20)
    assert [v.max_steps for v in trained] == [16, 8, 8, 4, 4, 2, 2], "a multiple of the longest interval"
    assert list(variants_of(convergence, train_batch_size=30)[1].numbers["losses"]) == NAMES[:3]


def test_one_exchange_per_micro_batch_is_ordinary_training(make_lab):
    lab = make_lab(max_steps=8)
    convergence(lab)
    losses = {name: of_seeds[0] for name, of_seeds in lab.page.numbers["losses"].items()}
    assert [len(of_steps) for of_steps in losses.values()] == [8, 4, 4, 2, 2, 1, 1]
    assert losses["every 2"][0] == pytest.approx(np.mean(losses["every one"][:2]), rel=0.05), "the same rows"
    assert "Loss" in lab.page.parts[-1]


def test_differences_of_accuracies_are_paired():
    frame = accuracies(
        {
            "a": [(0.80, []), (0.82, []), (0.84, [])],
            "same": [(0.80, []), (0.82, []), (0.84, [])],
            "b": [(0.70, []), (0.71, []), (0.75, [])],
        }
    )
    assert frame["accuracy"].tolist() == ["82.00%", "82.00%", "72.00%"]
    first, same, other = frame["difference, points"]
    assert (first, same) == ("", "+0.00")
    assert other.startswith("-10.00 [-1")
    one_seed = accuracies({"a": [(0.5, [])], "b": [(0.25, [])]})
    assert one_seed["difference, points"].tolist() == ["", "-25.00"]
