"""The ladder of exchanges: which buffers each variant exchanges, and that all of them train alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from helpers.worlds import batch_plan, fake_world

from app.bench import rounds
from app.bench.communication import ladder, step_variants
from app.bench.communication.ladder import (
    NO_EXCHANGE,
    ExchangeAfterBackward,
    in_buckets,
    ladder_variants,
    measure_ladder,
    summarize,
)
from app.bench.communication.step_variants import Comparison
from app.setting_groups import TINY_BERT
from app.settings import Settings
from app.training.build import build_data


def test_the_variants_are_those_of_the_paper():
    variants = ladder_variants(Settings(strategy="zero3", cpu_offload=True, logical_ranks=4, ddp_bucket_cap_mb=5))
    assert list(variants) == [
        "no exchange",
        "after backward, per parameter",
        "after backward, one buffer",
        "after backward, 25 MiB",
        "DDP, default",
        "DDP, per parameter",
        *(f"DDP, {size} MiB" for size in ("0.0625", "0.25", "1", "5", "25")),
    ]
    assert all(variant.settings == Settings() for variant in variants.values())


def test_a_bucket_is_complete_once_it_has_reached_the_limit():
    tensors = [torch.zeros(n) for n in (1, 2, 3, 10, 1)]
    sizes = [[len(tensor) for tensor in bucket] for bucket in in_buckets(tensors, 12)]
    assert sizes == [[1, 2], [3], [10], [1]]
    assert len(list(in_buckets(tensors, float("inf")))) == 1


@pytest.mark.parametrize(
    ("bucket_mib", "exchanged"),
    [(None, []), (0.0, [2, 3, 4]), (float("inf"), [9]), (5 * 4 / 2**20, [7, 2])],
)
def test_gradients_are_averaged_in_buffers_of_the_given_size(monkeypatch, bucket_mib, exchanged):
    class Done:
        def wait(self):
            pass

    sizes = []

    def double(tensor, async_op=False):  # the other rank has the same gradients
        sizes.append(tensor.numel())
        tensor.mul_(2)
        return Done() if async_op else None

    monkeypatch.setattr(dist, "all_reduce", double)
    strategy = ExchangeAfterBackward(Settings(), batch_plan(2), fake_world(0, 2), bucket_mib=bucket_mib)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(n)) for n in (2, 3, 4)])
    assert strategy.wrap(model) is model
    for number in range(strategy.plan.micro_batches_per_step):
        with strategy.accumulate(model, number):
            assert sizes == [], "only after the last backward pass"
            sum((parameter * (i + 1)).sum() for i, parameter in enumerate(model)).backward()
    assert sizes == exchanged
    factor = strategy.plan.micro_batches_per_step * (0.5 if bucket_mib is None else 1)
    for i, parameter in enumerate(model):
        assert parameter.grad.tolist() == [(i + 1) * factor] * len(parameter)


def test_the_section_shows_that_the_losses_are_equal(review_csv, tmp_path, monkeypatch, world):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ladder, "models", lambda name: [TINY_BERT])
    monkeypatch.setattr(rounds, "ROUNDS", 1)
    monkeypatch.setattr(rounds, "FEWEST_ROUNDS", 1)
    monkeypatch.setattr(step_variants, "MICRO_BATCHES", {TINY_BERT: 1})
    settings = Settings(csv=str(review_csv(90)), max_length=16, train_batch_size=8, disable_tqdm=True)
    section = measure_ladder(settings, build_data(settings, world), 0.001, world=world)
    names = list(ladder_variants(settings))
    assert list(section.data[TINY_BERT]["seconds"]) == names
    assert section.data[TINY_BERT]["loss_differences"] == dict.fromkeys(names, 0.0), (
        "with one rank, nothing is exchanged"
    )
    figure, table = section.parts
    assert [row[0] for row in table.rows] == names
    assert table.header[-1] == "losses differ by"
    assert {row[-1] for row in table.rows} == {"0"}
    assert names[0] in figure.svg


def test_the_summary_names_the_fastest_ddp():
    seconds = {NO_EXCHANGE: [1.0], "after backward, per parameter": [6.0], "after backward, one buffer": [1.5]}
    comparison = Comparison("model", seconds | {"DDP, default": [3.0], "DDP, 1 MiB": [2.0]})
    assert "takes 3.00 times as long as the fastest, DDP, 1 MiB" in summarize(comparison)


def test_different_losses_are_reported(world):
    losses = {"DDP, default": [1.0, 2.0], "other": [1.0, 2.5], "same": [1.0, 2.0]}
    comparison = replace(Comparison("model", {}), losses=losses)
    assert ladder.loss_differences(comparison, world) == {"DDP, default": 0.0, "other": 0.5, "same": 0.0}
