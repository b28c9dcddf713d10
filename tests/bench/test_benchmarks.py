"""The benchmarks, shortened: they time the training step of app.ddp_loop and print a ratio."""

from __future__ import annotations

import re
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest

from app.bench import memory, traffic
from app.bench.steps import distribute_named, with_each_strategy
from app.common.errors import RunError
from app.plan.step import Plan
from app.plan.traffic import Collective
from app.settings import STRATEGIES, Settings
from app.training.build import build_data


@pytest.fixture
def settings(review_csv, tmp_path, monkeypatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    return Settings(
        model="tiny-bert",
        csv=str(review_csv(90)),
        max_length=16,
        train_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=1e-9,
    )


def test_a_timed_step_uses_accumulation_and_clipping_as_training_does(make_lab):
    lab = make_lab(gradient_accumulation_steps=2, max_grad_norm=1e-9)
    bench = distribute_named(lab, "tiny-bert", lab.settings)
    optimization = bench.optimization(10)
    norms: list[float] = []
    optimization.optimizer.register_step_pre_hook(
        lambda *_: norms.append(sum(float(p.grad.square().sum()) for p in bench.model.parameters()) ** 0.5)
    )
    micro_batches = iter(bench.loader)
    bench.train_steps(micro_batches, optimization, steps=3)
    assert len(norms) == 3
    assert max(norms) == pytest.approx(1e-9, rel=1e-2), "the gradients are clipped"
    assert len(list(micro_batches)) == len(bench.loader) - 6, "each step takes two micro-batches"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_measured_memory_is_the_predicted_memory(strategy, settings, world, capsys):
    settings = replace(settings, strategy=strategy, train_batch_size=32)
    assert memory.measure("tiny", settings, data=build_data(settings, world), world=world) == []
    shares = [float(share) for share in re.findall(r"([+-]\d+\.\d)%", capsys.readouterr().out)]
    assert len(shares) == 2
    assert max(map(abs, shares)) <= 2


def test_memory_that_differs_from_the_plan_ends_the_benchmark(settings, world, monkeypatch):
    """PyTorch's own dropout keeps masks of another size than row dropout."""

    @contextmanager
    def own_dropout(*_):
        yield

    monkeypatch.setattr(memory, "RowDropout", own_dropout)
    monkeypatch.setattr(memory, "join", lambda _: nullcontext(world))
    monkeypatch.setattr(memory, "with_each_strategy", lambda settings: [settings])
    with pytest.raises(RunError, match=r"differs by more than 2% from the plan: tiny-bert, ddp, rank 0, activations"):
        memory.main(replace(settings, train_batch_size=32), sizes=False)


def test_counted_collectives_are_printed_next_to_the_predicted_ones(settings, world, capsys):
    traffic.compare(settings, build_data(settings, world), world)
    lines = re.findall(
        r"^\| (all-reduce) \| all ranks \| (.*?) \| [\d,]+ \| (\d+) \| (\d+) \|$",
        capsys.readouterr().out,
        re.M,
    )
    assert [what for _, what, _, _ in lines][:2] == ["gradients: bucket 1", "gradients: bucket 2"]
    assert {(predicted, counted) for *_, predicted, counted in lines} == {("1", "1")}


def test_a_collective_that_was_not_predicted_ends_the_benchmark(settings, world, monkeypatch, capsys):
    monkeypatch.setattr(Plan, "traffic", lambda *_: [Collective("gradients", "bucket 1", "all-reduce", 1)])
    with pytest.raises(RunError, match=r"ddp: rank\(s\) \[0\] called other collectives than predicted"):
        traffic.compare(settings, build_data(settings, world), world)
    out = capsys.readouterr().out
    assert "| all-reduce | all ranks | gradients: bucket 1 | 1 | 1 | 0 |" in out
    assert re.search(r"\| all-reduce \| all ranks \| not predicted \| [\d,]+ \| 0 \| 1 \|", out)


def test_every_strategy_that_supports_the_settings_is_measured():
    assert [one.strategy for one in with_each_strategy(Settings())] == list(STRATEGIES)
    assert [one.strategy for one in with_each_strategy(Settings(ddp_comm_hook="bf16"))] == ["ddp", "zero1"]
    reduced = with_each_strategy(Settings(strategy="zero2", reduce_dtype="bf16"))
    assert [one.strategy for one in reduced] == ["zero2", "zero3"]
    offloaded = with_each_strategy(Settings(strategy="zero3", cpu_offload=True))
    assert [one.cpu_offload for one in offloaded] == [False, False, False, True]
