"""The laboratory's sections on training steps and trainings, shortened and with one rank."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
from helpers.worlds import batch_plan

from app.bench import ladder, sections
from app.bench.communication import MEASURE
from app.bench.traffic import CountCollectives
from app.common.errors import AgreedError
from app.settings import Settings

SECTIONS = ["no_sync", "unused_parameters", "reduction", "compression", "ladder", "convergence"]


@pytest.fixture
def variants_of(monkeypatch, make_lab):
    """Return a function that runs a section without its training, and returns the settings that it compares by name."""

    def run(name, size=1, **changes):
        seen, lab = {}, make_lab(**changes)

        def time_steps(lab, variants, *, micro_batches=None):
            seen.update({key: settings for key, (settings, _) in variants.items()})
            return (pd.DataFrame({key: [float(i)] for i, key in enumerate(variants, start=1)}),) * 2

        def train_all(lab, variants):
            seen.update(variants)
            return pd.DataFrame(0.5, [1], list(variants)), {name: [[1.0]] for name in variants}

        for module in (sections, ladder):
            monkeypatch.setattr(module, "time_steps", time_steps)
        monkeypatch.setattr(sections, "train_all", train_all)
        lab.world = replace(lab.world, size=size)
        MEASURE[name](lab)
        return seen, lab.page.text[-1]

    return run


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_compares_ddp_whatever_the_strategy(variants_of, name):
    variants, _ = variants_of(name, strategy="zero3", cpu_offload=True)
    assert len(variants) > 1
    assert {(v.strategy, v.cpu_offload) for v in variants.values()} == {("ddp", False)}


def test_a_setting_that_a_section_cannot_vary_is_one_line(variants_of, make_lab):
    assert {v.strategy for v in variants_of("compression", strategy="zero1")[0].values()} == {"zero1"}
    with pytest.raises(AgreedError, match=r"^--ddp_comm_hook power_sgd needs a finite gradient"):
        variants_of("compression", precision="fp16")
    lab = make_lab(seed=2**31 - 1)
    lab.seeds = 2  # the last one is too large
    with pytest.raises(AgreedError, match="--seed"):
        sections.convergence(lab)


def test_skipping_synchronization_keeps_the_size_of_a_micro_batch(variants_of):
    variants, table = variants_of("no_sync", per_device_train_batch_size=4)
    sizes = {name: (v.train_batch_size, v.gradient_accumulation_steps) for name, v in variants.items()}
    assert sizes == {"every one": (4, 1), "every 2": (8, 2), "every 4": (16, 4), "every 8": (32, 8)}
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()[2:]]
    assert [row[2] for row in rows] == ["1 s", "1 s", "750 ms", "500 ms"]
    assert rows[0][3:6] == ["1.000"] * 3, "every variant is compared with the first"
    # Micro-batches for which there are not enough rows are left out.
    assert list(variants_of("no_sync", train_batch_size=40)[0]) == ["every one", "every 2"]


@pytest.mark.parametrize(("ranks", "counts"), [(1, [1, 2]), (2, [2, 4]), (3, [3])])
def test_only_possible_numbers_of_logical_ranks_are_compared(variants_of, ranks, counts):
    variants, _ = variants_of("reduction", ranks)
    assert [variant.logical_ranks for variant in variants.values()] == [None, *counts]


@pytest.mark.parametrize(("mib", "exchanged"), [(None, []), (0, [4, 3, 2]), (math.inf, [9]), (7 * 4 / 2**20, [7, 2])])
def test_the_ladder_exchanges_gradients_after_the_last_backward_pass_in_buffers_of_the_given_size(
    world, mib, exchanged
):
    """tests/launched/test_commands.py compares the losses of two ranks with those of DDP."""
    of_two = replace(world, size=2)
    strategy = ladder.ExchangeAfterBackward(Settings(), batch_plan(1, accumulation=2), of_two, mib=mib)
    model = strategy.wrap(torch.nn.ParameterList([torch.ones(n) for n in (2, 3, 4)]))
    for number, expected in enumerate(([], exchanged)):
        with CountCollectives(world.topology) as mode, strategy.accumulate(model, number):
            sum(parameter.sum() for parameter in model).backward()
        assert [size // 4 for _, size, _ in mode.counts] == expected
    assert {value for parameter in model for value in parameter.grad.tolist()} == {1}, "half of two backward passes"


def test_all_trainings_of_the_convergence_see_the_same_rows(variants_of, make_lab):
    trained, _ = variants_of("convergence", learning_rate=1e-4, max_steps=20)
    assert [v.max_steps for v in trained.values()] == [16, 8, 8, 4, 4, 2, 2], "a multiple of the longest interval"
    assert {v.train_batch_size * v.max_steps for v in trained.values()} == {16 * 8}
    assert {v.train_batch_size // v.gradient_accumulation_steps for v in trained.values()} == {8}
    assert [round(v.learning_rate / 1e-4) for v in trained.values()] == [1, 1, 2, 1, 4, 1, 8]
    assert list(variants_of("convergence", train_batch_size=30)[0]) == ["every one", "every 2", "every 2, lr × 2"]
