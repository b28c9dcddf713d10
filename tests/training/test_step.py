"""Seeds of dropout, parameter groups, warmup and schedule."""

from __future__ import annotations

import random
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from helpers.worlds import batch_plan, fake_world
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertForSequenceClassification

from app.settings import Settings
from app.strategies.ddp import DDPStrategy
from app.training.step import build_optimizer, build_scheduler, seed_micro_batch, warmup_steps

PLACES = st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 10**9), st.integers(0, 1023), st.integers(0, 1023))


def seed_at(seed: int, step: int, logical_rank: int, number: int) -> None:
    seed_micro_batch(seed, step, logical_rank=logical_rank, number=number)


def draws() -> dict[str, list[float]]:
    """Masks and numbers of every generator that a model or a library may use."""
    return {
        "mask": torch.nn.functional.dropout(torch.ones(64), 0.5).tolist(),
        "torch": torch.rand(4).tolist(),
        "numpy": [*np.random.rand(4), np.random.randn()],
        "python": [random.random(), random.gauss(0, 1)],
    }


@given(place=PLACES, drawn=st.integers(0, 700), gaussian=st.booleans())
def test_the_same_place_has_the_same_masks_whatever_was_drawn_before(place, drawn, gaussian):
    """NumPy and Python draw Gaussians in pairs: after an odd number of them, one is kept in the state."""
    seed_at(*place)
    expected = draws()
    torch.rand(drawn), np.random.rand(drawn), [random.random() for _ in range(drawn)]
    if gaussian:
        torch.randn(1), np.random.randn(), random.gauss(0, 1)
    seed_at(*place)
    assert draws() == expected


@given(place=PLACES, index=st.integers(0, 3), distance=st.integers(1, 5))
def test_another_seed_step_logical_rank_or_number_has_other_masks(place, index, distance):
    seed_at(*place)
    before = draws()
    changed = list(place)
    changed[index] += distance
    seed_at(*changed)
    assert all(before[name] != values for name, values in draws().items())


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)])
def test_places_with_the_same_numbers_in_another_order_have_other_masks(order):
    """A sum of seed, step and rank would be the same."""
    numbers = (1, 2, 3, 4)
    seed_at(*numbers)
    mask = draws()["mask"]
    seed_at(*(numbers[i] for i in order))
    assert (draws()["mask"] == mask) is (order == (0, 1, 2, 3))


def test_no_two_of_thousands_of_micro_batches_share_their_random_numbers():
    places = list(product([42, 43], range(64), range(8), range(2)))
    of_torch, of_numpy, of_python = set(), set(), set()
    for place in places:
        seed_at(*place)
        of_torch.add(torch.initial_seed())
        of_numpy.add(np.random.rand())
        of_python.add(random.random())
    assert len(of_torch) == len(of_numpy) == len(of_python) == len(places)


def test_the_masks_of_consecutive_steps_and_neighboring_ranks_are_unrelated():
    masks = []
    for place in product([42], range(20), range(4), [0]):
        seed_at(*place)
        masks.append((torch.rand(4_000) < 0.5).double())
    for a, b in pairwise(masks):
        assert abs(float((a == b).double().mean()) - 0.5) < 0.05  # six standard deviations


def test_weight_decay_applies_to_matrices_but_not_to_biases_and_norms():
    model = BertForSequenceClassification(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    settings = Settings(weight_decay=0.1)
    optimizer = build_optimizer(model, settings, 1e-3, strategy=DDPStrategy(settings, batch_plan(), fake_world()))
    decayed, kept = (group["params"] for group in optimizer.param_groups)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in kept} == {n for n in names.values() if n.endswith("bias") or "LayerNorm" in n}
    assert len(decayed) + len(kept) == len(names)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(group["fused"] for group in optimizer.param_groups)


@pytest.mark.parametrize(("requested", "steps"), [(0, 0), (0.1, 10), (0.105, 11), (1, 1), (25, 25)])
def test_warmup_is_a_number_of_steps_or_a_share_of_all_steps(requested, steps):
    assert warmup_steps(requested, 100) == steps


def test_the_learning_rate_rises_to_its_peak_and_falls_to_zero():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_scheduler(optimizer, Settings(warmup_steps=10), 110)
    rates = []
    for _ in range(110):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[0] == 0.0
    assert rates[10] == max(rates) == 1.0
    assert rates[60] == pytest.approx(0.5)
    assert scheduler.get_last_lr()[0] == pytest.approx(0.0)
