"""The benchmarks, shortened: they time the training step of app.ddp_loop and print a ratio."""

from __future__ import annotations

import re

import pytest

from app.bench import checkpoint_cost, recipe
from app.bench.harness import set_up
from app.settings import Settings
from app.training.optim import build_optimizer, build_scheduler


@pytest.fixture
def settings(review_csv, tmp_path, monkeypatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    return Settings(
        csv=str(review_csv(90)), max_length=16, train_batch_size=8, gradient_accumulation_steps=2, max_grad_norm=1e-9
    )


def test_a_timed_step_uses_accumulation_and_clipping_as_training_does(settings, world):
    bench = set_up(settings, world)
    optimizer = build_optimizer(bench.wrapped, settings, 1e-4, bench.strategy)
    norms: list[float] = []
    optimizer.register_step_pre_hook(
        lambda *_: norms.append(sum(float(p.grad.square().sum()) for p in bench.model.parameters()) ** 0.5)
    )
    micro_batches = iter(bench.loader)
    bench.train_steps(micro_batches, optimizer, build_scheduler(optimizer, settings, 10), steps=3)
    assert len(norms) == 3
    assert max(norms) == pytest.approx(1e-9, rel=1e-2), "the gradients are clipped"
    assert len(list(micro_batches)) == len(bench.loader) - 6, "each step takes two micro-batches"


@pytest.mark.parametrize(
    ("benchmark", "result"),
    [(recipe, r"ratio: median \d+\.\d+, from"), (checkpoint_cost, r"costs [+-]\d+\.\d% \(median of 2 rounds")],
)
def test_a_benchmark_prints_the_median_of_its_rounds(benchmark, result, settings, world, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "ROUNDS", 2)
    monkeypatch.setattr(benchmark, "STEPS", 2)
    benchmark.benchmark(settings, world, *([tmp_path] if benchmark is checkpoint_cost else []))
    assert re.search(result, capsys.readouterr().out)
