"""The benchmarks that compare a training step with the plan."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest

from app.bench import memory, planned, traffic
from app.bench.planned import with_each_strategy
from app.common.errors import RunError
from app.plan.traffic import Collective
from app.setting_groups import TINY_BERT
from app.settings import STRATEGIES, Settings


@pytest.fixture
def lab(make_lab, monkeypatch, world):
    monkeypatch.setattr(planned, "join", lambda _: nullcontext(world))
    return make_lab(model=TINY_BERT, train_batch_size=32, gradient_accumulation_steps=2)


def test_measured_memory_is_the_predicted_memory_under_each_strategy(lab, capsys):
    memory.main(lab.settings)  # raises if it differs by more than 0.5%
    out = capsys.readouterr().out
    assert re.findall(r"^## (\w+)$", out, re.M) == list(STRATEGIES)
    rows = re.findall(r"^\| (.*?) +\| +([\d.]+) \| +([\d.]+) \| +0 \|$", out, re.M)
    assert [name for name, *_ in rows] == ["parameters", "gradients", "optimizer state", "activations"] * 4
    assert min(float(measured) for _, _, measured in rows) > 0


def test_a_step_that_differs_from_the_plan_ends_the_benchmark(lab, monkeypatch, capsys):
    """PyTorch's own dropout keeps masks of another size than row dropout."""
    monkeypatch.setattr(planned, "with_each_strategy", lambda settings: [settings])
    monkeypatch.setattr(memory, "RowDropout", lambda *_: nullcontext())
    with pytest.raises(RunError, match=r"^measured values differ from the plan: ddp, rank 0: activations$"):
        memory.main(lab.settings)
    monkeypatch.setattr(traffic, "plan_traffic", lambda _: [Collective("gradients", "bucket 1", "all-reduce", 1)])
    with pytest.raises(RunError, match=r"plan: ddp, rank 0: all-reduce of 1 bytes; ddp, rank 0: all-reduce of "):
        traffic.main(lab.settings)
    out = " ".join(capsys.readouterr().out.split())
    assert "| all-reduce of 1 bytes | all ranks | gradients: bucket 1 | 1 | 0 | 0 |" in out
    assert re.search(r"\| all-reduce of [\d,]+ bytes \| all ranks \| not predicted \| 0 \| 1 \| 0 \|", out)


def test_every_strategy_that_supports_the_settings_is_measured():
    assert [one.strategy for one in with_each_strategy(Settings(ddp_comm_hook="bf16"))] == ["ddp", "zero1"]
    offloaded = with_each_strategy(Settings(strategy="zero3", cpu_offload=True))
    assert [one.cpu_offload for one in offloaded] == [False, False, False, True]
