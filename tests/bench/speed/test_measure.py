"""Ratios, padding and MFU of rounds, and what each recipe does, with one rank in this process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from transformers import PreTrainedModel

from app import ddp_loop
from app.bench.speed import measure as measuring
from app.bench.speed.__main__ import needed_memory
from app.bench.speed.measure import OWN, Result, Round, as_data, measure, ratio
from app.bench.speed.recipe import Count, Recipe, Task, precision_of
from app.bench.speed.report import ratios, section, speeds
from app.distributed.world import World
from app.flags import RECIPES
from app.model.dropout import RowDropout
from app.settings import Settings
from app.training.build import build_data, build_model


def result(*seconds: float, tokens: int = 600) -> Result:
    rounds = [Round(one, 2 * one, Count(10, tokens, 800)) for one in seconds]
    return Result(rounds, [0.5 / one for one in seconds])


OURS, THEIRS = result(1, 2, 4), result(2, 8, 6, tokens=400)


def test_ratios_compare_the_rounds_in_pairs():
    assert ratio(OURS, THEIRS, lambda one: one.examples_per_second) == (2, 1.5, 4)
    assert ratio(THEIRS, OURS, lambda one: one.count.tokens) == (400 / 600,) * 3


def test_a_result_has_medians_and_the_padding_of_all_rounds():
    assert OURS.median(lambda one: one.examples_per_second) == 5
    assert OURS.median(lambda one: one.examples_per_cpu_second) == 2.5
    assert (OURS.padding, THEIRS.padding) == (0.25, 0.5)


def test_the_numbers_for_the_file_have_every_round():
    data = as_data({"ddp_loop": OURS, "tutorial": THEIRS})["ddp_loop"]
    assert data["rounds"][1] == {"seconds": 2, "cpu_seconds": 4, "examples": 10, "tokens": 600, "padded_tokens": 800}
    assert data["tokens_per_second"] == 300
    assert (data["mfu"], data["mfu_of_rounds"]) == (0.25, [0.5, 0.25, 0.125])
    assert data["times_as_fast_as"] == {"tutorial": {"middle": 2, "low": 1.5, "high": 4}}


def test_the_tables_have_a_column_for_each_of_our_recipes():
    results = {"ddp_loop": OURS, "tutorial": THEIRS}
    assert speeds(results).rows == [
        ["ddp_loop", "5.0", "2.5 to 10.0", "300", "25.0%", "25.0%"],
        ["tutorial", "1.7", "1.2 to 5.0", "67", "50.0%", "8.3%"],
    ]
    table = ratios("faster", "", results, value=lambda one: one.examples_per_second)
    assert table.header == ["compared with", "ddp_loop"]
    assert table.rows == [["ddp_loop", "1"], ["tutorial", "2.00 (1.50 to 4.00)"]]


def test_one_recipe_has_its_memory_and_no_ratio():
    alone = replace(OURS, mfu=(), peak_memory=(3 * 2**20, 2**20))
    assert speeds({"ddp_loop": alone}).rows[0][-2:] == ["–", "3.0, 1.0"]
    titles = [part.title for part in section("tiny", "tiny, 2 ranks", {"ddp_loop": alone}, on_cpu=True).parts]
    assert titles == ["speed", "examples per second"]


# ---- the recipes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path, monkeypatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    rows = [f"{'abcdefgh'[row % 8] * (row % 5)} {'你好 ' * (row % 11)}.,{row % 2}" for row in range(90)]
    (tmp_path / "reviews.csv").write_text("\n".join(["review,label", *rows]), encoding="utf-8")
    return Settings(model="tiny-bert", csv="reviews.csv", max_length=32, train_batch_size=8, disable_tqdm=True)


@pytest.fixture
def task(settings, world) -> Task:
    data = build_data(settings, world)
    return Task(data, build_model(settings, data, world).model, steps=2, rounds=3)


class Watch:
    """Takes the place of `measure_round`, and watches the recipe's forward passes from inside of its model."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}  # of the recipes, by their id
        self.seen: dict[str, list[tuple[bool, bool, str, bool]]] = {name: [] for name in RECIPES}
        self.lengths: dict[str, set[int]] = {name: set() for name in RECIPES}
        self.measure_round = measuring.measure_round

    def __call__(self, recipe: Recipe, steps: int, number: int, *, world: World) -> Round:
        if id(recipe) not in self.names:
            self.names[id(recipe)] = name = RECIPES[len(self.names)]
            # Mixed precision may replace the forward of the complete model, so a hook of its own would run before it.
            recipe.model.base_model.register_forward_pre_hook(partial(self.watch, name))
        return self.measure_round(recipe, steps, number, world=world)

    def watch(self, name: str, model: PreTrainedModel, arguments: Any) -> None:
        has_masks = any(isinstance(mode, RowDropout) for mode in _get_current_function_mode_stack())
        in_bf16 = torch.is_autocast_enabled("cpu")
        self.seen[name].append((in_bf16, has_masks, model.config._attn_implementation, model.training))
        self.lengths[name].add(arguments[0].shape[1])


def test_every_recipe_trains_in_its_own_way(settings, task, world, tmp_path, monkeypatch):
    steps_of_ddp_loop = []
    train_step = ddp_loop.train_step
    monkeypatch.setattr(ddp_loop, "train_step", lambda *a, **k: steps_of_ddp_loop.append(1) or train_step(*a, **k))
    monkeypatch.setattr(measuring, "measure_peak_flops", lambda device, precision: 1e12)
    watch = Watch()
    monkeypatch.setattr(measuring, "measure_round", watch)
    results = measure(RECIPES, task, settings, folder=tmp_path / "runs", world=world)
    for name in RECIPES:
        own = name in OWN
        expected = (precision_of(name) == "bf16", own, "eager" if own else "sdpa", True)
        assert watch.seen[name] == [expected] * 6, name
        assert [one.count.examples for one in results[name].rounds] == [16, 16], name
        assert len(results[name].mfu) == 2
    assert len(steps_of_ddp_loop) == 2 * 6
    assert watch.lengths["tutorial"] == {32}
    assert max(watch.lengths["accelerate"]) < 32
    assert {length % 8 for length in watch.lengths["accelerate-bf16"]} == {0}
    assert results["ddp_loop"].rounds[0].count == results["trainer_run"].rounds[0].count, "the same batches"
    assert results["tutorial"].padding > results["accelerate"].padding > results["ddp_loop"].padding


def test_the_memory_of_a_recipe_is_its_state_and_the_activations_of_its_precision(settings, task):
    state = 20 * task.model.num_parameters()
    fp32, bf16 = (needed_memory(task, settings, names) - state for names in (["ddp_loop", "tutorial"], ["x-bf16"]))
    assert 0 < bf16 < fp32
    longer = needed_memory(task, replace(settings, max_length=2 * settings.max_length), ["tutorial"]) - state
    assert longer > 2 * fp32, "attention grows with the square of the length"


def test_mfu_is_that_of_runs(settings, task, world, tmp_path, monkeypatch):
    monkeypatch.setattr(
        measuring, "measure_peak_flops", lambda device, precision: {"fp32": 1e12, "bf16": 4e12}[precision]
    )
    results = measure(["ddp_loop", "ddp_loop-bf16"], task, settings, folder=tmp_path / "runs", world=world)
    parameters = task.model.num_parameters(exclude_embeddings=True)
    for name, peak in (("ddp_loop", 1e12), ("ddp_loop-bf16", 4e12)):
        one = results[name].rounds[0]
        assert results[name].mfu[0] == pytest.approx(6 * parameters * one.count.tokens / one.seconds / peak)


def test_a_single_recipe_measures_its_memory_instead_of_the_peak(settings, task, world, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "measure_peak_flops", lambda *_: pytest.fail("its matrices take memory, too"))
    alone = measure(["accelerate"], task, settings, folder=tmp_path / "runs", world=world)["accelerate"]
    assert not alone.mfu
    assert alone.peak_memory[0] > 100 * 2**20
