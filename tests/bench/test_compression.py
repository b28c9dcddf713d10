"""What the laboratory says about compressed gradients: counted bytes, paired accuracies, and a section of its page."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from worlds import fake_world

from app.bench import compression
from app.bench.compression import CountSent, Measured, measure_hooks, training_steps
from app.bench.compression_section import as_section, measure_compression
from app.bench.harness import distribute
from app.bench.page import Figure, Table, as_html, as_text
from app.errors import AgreedError
from app.settings import Settings
from app.training.build import build_data, build_model
from app.training.optim import build_optimizer, build_scheduler

HOOKS = ("no", "fp16", "bf16", "power_sgd")


@pytest.fixture
def settings(review_csv, tmp_path, monkeypatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compression, "ROUNDS", 2)
    monkeypatch.setattr(compression, "STEPS", 3)
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
    with CountSent(4) as counter:
        call(torch.zeros(10, 10, dtype=torch.bfloat16))
        torch.zeros(1000).add_(1)
    assert counter.sent == times * 0.75 * 200


@pytest.mark.parametrize(("hook", "size"), [("no", 4), ("fp16", 2), ("bf16", 2)])
def test_a_training_step_sends_every_gradient_once(settings, world, hook, size):
    """As if it had two ranks: with one, the collectives are the same."""
    settings.ddp_comm_hook = hook
    data = build_data(settings, world)
    bench = distribute(settings, data, build_model(settings, data, world).model, world)
    optimizer = build_optimizer(bench.wrapped, settings, 1e-4, bench.strategy)
    with CountSent(2) as counter:
        bench.train_steps(bench.loader, optimizer, build_scheduler(optimizer, settings, 1), 1)
    buffers = sum(buffer.nbytes for buffer in bench.model.buffers()) / 2  # DDP broadcasts them before a forward pass
    assert counter.sent == size * sum(parameter.numel() for parameter in bench.model.parameters()) + buffers


def test_all_hooks_are_measured_and_trained_with_the_same_seeds(settings, world):
    measured, steps = measure_hooks(settings, world, seeds=2)
    assert steps == 4
    assert tuple(measured) == HOOKS
    for one in measured.values():
        assert (len(one.seconds), len(one.accuracies), one.sent) == (2, 2, 0)
        assert min(one.seconds) > 0
        assert all(0 <= accuracy <= 1 for accuracy in one.accuracies)
    again, _ = measure_hooks(settings, world, seeds=1)
    assert [one.accuracies for one in again.values()] == [one.accuracies[:1] for one in measured.values()]


def test_a_training_is_short_unless_its_length_is_given(settings, world):
    data = build_data(settings, world)
    assert training_steps(settings, data) == 4
    settings.max_steps = -1
    assert training_steps(settings, data) == data.plan.total_steps == 4
    monkey = Settings(csv=settings.csv, train_batch_size=8, max_length=16, num_train_epochs=1000)
    assert training_steps(monkey, build_data(monkey, world)) == 150


@pytest.mark.parametrize("change", [{"strategy": "zero3"}, {"precision": "fp16"}, {"seed": 2**31 - 1}])
def test_settings_that_a_hook_refuses_are_a_mistake(settings, world, change):
    for name, value in change.items():
        setattr(settings, name, value)
    with pytest.raises(AgreedError, match=r"--ddp_comm_hook|--seed"):
        measure_compression(settings, world, seeds=2)


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
    assert "power_sgd" in as_text(section)
    assert as_html("page", {}, [section]).count("<svg") == 2


def test_one_seed_has_no_interval_and_no_chart_of_accuracies():
    one_seed = {hook: Measured(m.seconds, m.sent, m.accuracies[:1]) for hook, m in MEASURED.items()}
    table, *figures = as_section(one_seed, 150, fake_world(0, 2)).parts
    assert {row[0]: row[-2] for row in table.rows}["bf16"] == "+1.00"
    assert len(figures) == 1
    assert len(as_section(MEASURED, 150, fake_world(1, 2)).parts) == 1, "only rank 0 draws"
