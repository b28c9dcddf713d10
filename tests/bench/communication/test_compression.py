"""What the laboratory says about compressed gradients: counted bytes, paired accuracies, and a section of its page."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.architectures import write_model
from helpers.worlds import fake_world

from app.bench import rounds
from app.bench.communication import step_variants
from app.bench.communication.compression import (
    Measured,
    as_section,
    measure_compression,
    measure_hooks,
    settings_by_hook,
    training_steps,
)
from app.bench.page import Figure, Table, as_html, as_markdown
from app.bench.steps import distribute
from app.bench.traffic import CountCollectives, sent_bytes
from app.common.errors import AgreedError
from app.distributed.world import Topology
from app.settings import Settings
from app.training.build import build_data, build_model

HOOKS = ("no", "fp16", "bf16", "power_sgd")


@pytest.fixture
def settings(review_csv, tmp_path, monkeypatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rounds, "ROUNDS", 1)
    monkeypatch.setattr(rounds, "FEWEST_ROUNDS", 1)
    monkeypatch.setattr(step_variants, "MICRO_BATCHES", {})
    monkeypatch.setattr(step_variants, "MICRO_BATCHES_OF_OTHERS", 1)
    return Settings(csv=str(review_csv(90)), max_length=16, train_batch_size=8, max_steps=4, disable_tqdm=True)


@pytest.mark.parametrize(
    ("call", "times"),
    [
        (lambda x: dist.all_reduce(x), 2),
        (lambda x: dist.broadcast(x, src=0), 1),
        (lambda x: dist.all_to_all_single(x, x.clone()), 1),
    ],
)
def test_what_a_rank_sends_is_counted_from_the_tensors(world, call, times):
    with CountCollectives(Topology(1)) as counter:
        call(torch.zeros(10, 10, dtype=torch.bfloat16))
        torch.zeros(1000).add_(1)
    assert sent_bytes(counter.counts, Topology(4)) == times * 0.75 * 200


@pytest.mark.parametrize(("hook", "size"), [("no", 4), ("fp16", 2), ("bf16", 2)])
def test_a_training_step_sends_every_gradient_once(settings, world, hook, size):
    """As if it had two ranks: with one, the collectives are the same."""
    settings.ddp_comm_hook = hook
    data = build_data(settings, world)
    bench = distribute(settings, data, build_model(settings, data, world).model, world=world)
    optimization = bench.optimization(1)
    with CountCollectives(Topology(1)) as counter:
        bench.train_steps(bench.loader, optimization, steps=1)
    n = sum(parameter.numel() for parameter in bench.model.parameters())
    assert sent_bytes(counter.counts, Topology(2)) == size * n


def test_all_hooks_are_measured_and_trained_with_the_same_seeds(settings, world, tmp_path):
    settings.model = str(write_model(tmp_path / "model", "bert"))
    data = build_data(settings, world)
    by_hook, _ = settings_by_hook(settings, 2, n_train=len(data.split.train), ranks=1)
    measured, steps = measure_hooks(by_hook, data, seeds=2, seconds=0.001, world=world)
    assert steps == 4
    assert tuple(measured) == HOOKS
    for result in measured.values():
        assert (len(result.seconds), len(result.accuracies), result.sent) == (1, 2, 0)
        assert min(result.seconds) > 0
        assert all(0 <= accuracy <= 1 for accuracy in result.accuracies)
    again, _ = measure_hooks(by_hook, data, seeds=1, seconds=0.001, world=world)
    assert [result.accuracies for result in again.values()] == [result.accuracies[:1] for result in measured.values()]


def test_a_training_is_short_unless_its_length_is_given():
    assert training_steps(max_steps=200, total_steps=4) == 200
    assert training_steps(max_steps=-1, total_steps=4) == 4
    assert training_steps(max_steps=-1, total_steps=1000) == 150


@pytest.mark.parametrize(
    ("change", "hooks", "reason"),
    [
        ({}, HOOKS, ""),
        ({"strategy": "zero1", "ddp_comm_hook": "bf16"}, HOOKS, ""),
        ({"strategy": "zero3", "cpu_offload": True}, HOOKS, ""),
        ({"precision": "fp16"}, HOOKS[:3], "--ddp_comm_hook power_sgd: an overflow in fp16"),
        ({"logical_ranks": 4}, HOOKS[:3], "4 logical ranks need 4 ranks, not 2"),
        ({"ddp_find_unused_parameters": True}, HOOKS[:3], "--ddp_find_unused_parameters"),
    ],
)
def test_a_hook_is_left_out_if_the_settings_exclude_it(change, hooks, reason):
    by_hook, refusal = settings_by_hook(Settings(train_batch_size=8, **change), seeds=1, n_train=90, ranks=2)
    assert tuple(by_hook) == hooks
    assert [hooked.ddp_comm_hook for hooked in by_hook.values()] == [*hooks]
    assert {(hooked.strategy, hooked.cpu_offload) for hooked in by_hook.values()} == {
        ("zero1" if change.get("strategy") == "zero1" else "ddp", False)
    }
    assert reason in refusal
    assert bool(reason) == bool(refusal)


def test_the_section_says_why_a_hook_is_left_out():
    rest = {hook: one for hook, one in MEASURED.items() if hook != "power_sgd"}
    section = as_section(rest, 150, fake_world(0, 2), refusal="four <ranks>")
    assert "power_sgd is left out: four <ranks>." in section.paragraphs
    assert "power_sgd" not in section.data["hooks"]


def test_a_seed_that_is_too_large_is_a_mistake(settings, world):
    settings.seed = 2**31 - 1
    with pytest.raises(AgreedError, match="--seed"):
        measure_compression(settings, build_data(settings, world), 2, seconds=0.001, world=world)


MEASURED = {
    "no": Measured([0.10, 0.20, 0.30], 8e6, [0.80, 0.82, 0.84]),
    "fp16": Measured([0.09, 0.21, 0.31], 4e6, [0.80, 0.82, 0.84]),
    "bf16": Measured([0.05, 0.10, 0.15], 4e6, [0.81, 0.82, 0.86]),
    "power_sgd": Measured([0.11, 0.22, 0.33], 1e6, [0.70, 0.71, 0.75]),
}


def test_the_section_compares_every_hook_with_no_compression():
    section = as_section(MEASURED, 150, fake_world(0, 2))
    table, *figures = section.parts
    assert isinstance(table, Table)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["no"] == ("200.0", "", "7.63 MiB", "100.0%", "82.00%", "", "")
    assert rows["fp16"] == ("210.0", "+3.3% [-10.0%, +5.0%]", "3.81 MiB", "50.0%", "82.00%", "+0.00", "–")
    assert rows["bf16"][:2] == ("100.0", "-50.0% [-50.0%, -50.0%]")
    assert rows["bf16"][-1] == "–"
    assert rows["power_sgd"][-2].startswith("-10.00 [")
    assert rows["power_sgd"][-1] == "2.8 Gbit/s", "8 bits x 7e6 bytes in 0.02 s"
    assert len(figures) == 2
    assert all(isinstance(figure, Figure) for figure in figures)
    assert "150 steps, for 3 seed(s)" in section.paragraphs[-1]
    hooks = section.data["hooks"]
    assert hooks["no"]["interval"] is None
    low, high = hooks["power_sgd"]["interval"]
    assert low < -0.1 < high < 0
    assert "power_sgd" in as_markdown(section)
    assert as_html("page", {}, [section]).count("<svg") == 2


def test_one_seed_has_no_interval_and_no_chart_of_accuracies():
    one_seed = {hook: Measured(m.seconds, m.sent, m.accuracies[:1]) for hook, m in MEASURED.items()}
    table, *figures = as_section(one_seed, 150, fake_world(0, 2)).parts
    assert {row[0]: row[-2] for row in table.rows}["bf16"] == "+1.00"
    assert len(figures) == 1
    assert len(as_section(MEASURED, 150, fake_world(1, 2)).parts) == 1, "only rank 0 draws"
