"""The laboratory's sections on training steps, shortened and with one rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from helpers.worlds import batch_plan, fake_world

from app.bench import rounds
from app.bench.communication import step_variants, training_step
from app.bench.communication.step_variants import Comparison, compare, models, reduction_variants
from app.bench.communication.training_step import measure_step, variants_of
from app.bench.page import Table, as_html, as_markdown
from app.common.errors import UserError
from app.distributed.world import RankGroup, Topology
from app.flags import STEP_SECTIONS
from app.profiling.breakdown import CATEGORIES
from app.setting_groups import TINY_BERT
from app.settings import Settings
from app.training.build import build_data

NAMES = {
    "buckets": ["default", "1 MiB", "5 MiB", "25 MiB", "100 MiB"],
    "no_sync": ["every one", "every 2", "every 4", "every 8"],
    "unused_parameters": ["off", "on"],
    "reduction": ["plain all-reduce", "1 logical ranks", "2 logical ranks"],
}


@pytest.fixture
def settings(review_csv, tmp_path, monkeypatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_step, "models", lambda name: [TINY_BERT])
    monkeypatch.setattr(rounds, "ROUNDS", 1)
    monkeypatch.setattr(rounds, "FEWEST_ROUNDS", 1)
    monkeypatch.setattr(step_variants, "MICRO_BATCHES", {TINY_BERT: 1})
    return Settings(csv=str(review_csv(90)), max_length=16, train_batch_size=8, disable_tqdm=True)


def measure(name, settings, seconds, world):
    return measure_step(name, settings, build_data(settings, world), seconds=seconds, world=world)


@pytest.mark.parametrize("name", NAMES)
def test_a_section_compares_every_variant_with_the_first(settings, world, name):
    section = measure(name, settings, 0.001, world)
    seconds = section.data[TINY_BERT]["seconds"]
    assert list(seconds) == NAMES[name]
    assert min(map(min, seconds.values())) > 0
    figure, table = section.parts
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == NAMES[name]
    assert table.rows[0][2:] == ["1.000"] * 3
    for variant in NAMES[name]:
        assert variant in figure.svg
        assert variant in as_markdown(section)
    assert figure.title in as_html("page", {}, [section])


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_breakdown_adds_up_to_the_step(settings, world, strategy):
    section = measure("breakdown", replace(settings, strategy=strategy), 0.001, world)
    parts = section.data["models"][TINY_BERT]["milliseconds"]
    figure, table = section.parts
    rows = {row[0]: row[1:] for row in table.rows}
    assert [*parts] == [*rows][: len(CATEGORIES)] == [*CATEGORIES]
    assert float(rows["step"][0]) == pytest.approx(sum(parts.values()), abs=0.01)
    assert rows["step"][1] == "100.0%"
    assert float(rows["communication"][0]) >= float(rows["exposed communication"][0]) - 0.01
    assert strategy in section.title
    assert all(name in figure.svg for name in CATEGORIES)


@pytest.mark.parametrize("name", [*NAMES, "breakdown"])
@pytest.mark.parametrize("change", [{"strategy": "zero3", "cpu_offload": True}, {"ddp_comm_hook": "power_sgd"}])
def test_a_section_has_variants_whatever_the_strategy_and_the_compression(name, change):
    variants = variants_of(name, Settings(train_batch_size=8, **change), n_train=90, topology=Topology(1))
    assert list(variants) == NAMES.get(name, [""])
    kept = {(v.settings.strategy, v.settings.cpu_offload, v.settings.ddp_comm_hook) for v in variants.values()}
    given = Settings(**change)
    expected = (given.strategy, given.cpu_offload, given.ddp_comm_hook) if name == "breakdown" else ("ddp", False, "no")
    assert kept == {expected}


def test_every_section_can_be_measured():
    assert {*STEP_SECTIONS} == {*NAMES, "breakdown"}


def test_skipping_synchronization_keeps_the_size_of_a_micro_batch(settings, world, monkeypatch):
    settings_by_name = {}

    def record(model, variants, data, seconds, world, micro_batches):
        settings_by_name.update({name: variant.settings for name, variant in variants.items()})
        return Comparison(model, {name: [float(i)] for i, name in enumerate(variants, start=1)})

    monkeypatch.setattr(training_step, "compare", record)
    section = measure("no_sync", replace(settings, per_device_train_batch_size=4), 1.0, world)
    sizes = {
        name: (varied.train_batch_size, varied.gradient_accumulation_steps) for name, varied in settings_by_name.items()
    }
    assert sizes == {"every one": (4, 1), "every 2": (8, 2), "every 4": (16, 4), "every 8": (32, 8)}
    assert section.data[TINY_BERT]["seconds"]["every 8"] == [4 / 8], "a step of 8 micro-batches takes 8 times as long"


def test_micro_batches_for_which_there_are_not_enough_rows_are_left_out(settings, world):
    section = measure("no_sync", replace(settings, train_batch_size=40), 0.001, world)
    assert list(section.data[TINY_BERT]["seconds"]) == ["every one", "every 2"]


@pytest.mark.parametrize("name", ["unused_parameters", "no_sync"])
def test_all_variants_of_a_comparison_train_on_the_same_batches_again_and_again(settings, world, monkeypatch, name):
    data = build_data(settings, world)
    seen: list[torch.Tensor] = []
    train = torch.nn.Module.__call__

    def call(module, *arguments, **named):
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            seen.append(named["input_ids"])
        return train(module, *arguments, **named)

    monkeypatch.setattr(torch.nn.Module, "__call__", call)
    variants = variants_of(name, settings, 81, topology=world.topology)
    comparison = compare(TINY_BERT, variants, data, seconds=0.001, world=world, micro_batches=8)
    calls = [seen[i : i + 8] for i in range(0, len(seen), 8)]
    assert len(calls) > len(comparison.seconds)
    for before, after in pairwise(calls):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_buckets_differ_in_their_size_only(settings):
    variants = variants_of("buckets", settings, 81, topology=Topology(1))
    assert [variant.settings.ddp_bucket_cap_mb for variant in variants.values()] == [None, 1, 5, 25, 100]
    assert {replace(variant.settings, ddp_bucket_cap_mb=None) == settings for variant in variants.values()} == {True}


@pytest.mark.parametrize(("ranks", "counts"), [(1, [1, 2]), (2, [2, 4]), (3, [3]), (4, [4, 8])])
def test_only_possible_numbers_of_logical_ranks_are_compared(ranks, counts):
    variants = reduction_variants(Settings(logical_ranks=8), Topology(ranks))
    assert [variant.settings.logical_ranks for variant in variants.values()] == [None, *counts]


def test_on_several_nodes_the_sum_in_one_level_is_compared(settings):
    variants = reduction_variants(settings, Topology(4, 2))
    assert list(variants) == ["plain all-reduce", "in one level", "4 logical ranks", "8 logical ranks"]
    world = fake_world(3, 4, inside=2)
    groups = tuple(RankGroup(None, 2, 1) for _ in range(2))
    strategy = variants["in one level"].make_strategy(settings, batch_plan(4), replace(world, node_groups=groups))
    assert strategy.world.levels == (world.all_ranks,)


def test_ratios_are_those_of_the_same_round():
    comparison = Comparison("model", {"a": [1.0, 2.0, 4.0], "b": [3.0, 4.0]})
    assert comparison.relative("b") == (2.5, 2.0, 3.0)
    assert comparison.relative("a") == (1.0, 1.0, 1.0)
    assert comparison.median("a") == 2.0


def test_a_model_that_is_named_is_the_only_one():
    assert models("bert-base-chinese") == ["bert-base-chinese"]
    assert models(TINY_BERT) == [TINY_BERT, "BERT 4 x 312"]


def test_a_batch_that_cannot_be_divided_among_twice_as_many_logical_ranks_is_refused(settings, world):
    with pytest.raises(UserError, match="--train_batch_size 7 cannot be divided among --logical_ranks 2"):
        measure("reduction", replace(settings, train_batch_size=7), 0.001, world)
