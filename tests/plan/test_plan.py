"""The memory plan: its tables add up, and what it says fits. `--dry_run` prints the plan of a run.

tests/test_mistakes_in_laboratories.py has the mistakes in its command line.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.jobs import SAMPLE_CSV

from app import ddp_loop, trainer_run
from app.bench import memory, traffic
from app.checkpoint.resume import Resume
from app.cli import as_flags
from app.distributed.world import Topology
from app.jobs import flags_of
from app.plan import __main__ as module
from app.plan import report
from app.plan.report import describe_plans, largest_memory, needed
from app.plan.step import Plan, build_plan
from app.plan.traffic import plan_traffic
from app.program import run_program
from app.settings import STRATEGIES, Settings
from app.training import prepare

SETTINGS = {"csv": str(SAMPLE_CSV), "use_cpu": True, "max_length": 16, "train_batch_size": 8}
MEMORY, TRAFFIC = "## Memory of the rank that needs", "## Traffic: what a rank sends"


def build(**changes: Any) -> Plan:
    """Plan a step with some settings on two ranks."""
    return build_plan(Settings(**SETTINGS | changes), Topology(2, 2))


@pytest.fixture(scope="module")
def planned() -> Plan:
    return build(gradient_accumulation_steps=2)


def table(text: str, title: str) -> dict[str, list[float]]:
    """The numbers of each strategy in the table below a title."""
    lines = text[text.index(title) :].split("\n\n")[1].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {name: [float(cell.replace(",", "")) for cell in cells] for name, *cells in rows}


def verdict(text: str) -> str:
    return text.partition("## Verdict")[2]


@pytest.mark.parametrize("status", [0, 1])
def test_the_plan_is_printed_and_written_before_it_is_measured(tmp_path, monkeypatch, capsys, status):
    started = []
    monkeypatch.setattr(module, "run_job", lambda *arguments: started.append(arguments) or status)
    changes = {"gradient_accumulation_steps": 2, "threads": 1, "output_dir": str(tmp_path / "plan"), "max_steps": 9}
    flags = ["--ranks=2", "--device_memory=16MiB", "--measure", *as_flags(Settings(**SETTINGS | changes))]
    monkeypatch.setattr(sys, "argv", ["plan", *flags])
    assert run_program(module.main) == status
    text, (out, err) = (tmp_path / "plan" / "plan.md").read_text(), capsys.readouterr()
    assert text in out
    assert "8 rows per step = 2 rank(s) x 2 rows x 2 micro-batch(es); 16 tokens per row, fp32" in text
    assert "into 16.0 MiB fits: `ddp`, " in text
    assert [name for name, _, _ in started] == ["app.bench.memory", "app.bench.traffic"][: 2 - status]
    assert {(settings.threads, settings.max_length, ranks) for _, settings, ranks in started} == {(1, 16, 2)}
    for benchmark, (_, settings, _) in zip((memory, traffic), started, strict=False):
        assert benchmark.PROGRAM.parse(flags_of(settings))[0] == settings, "without --max_steps, which it lacks"
    assert ("app.bench.memory failed" in err) == bool(status)


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(8, 4)])
def test_the_tables_add_up_what_the_formulas_say(planned, topology):
    plans = replace(planned, topology=topology).with_each_strategy()
    text = describe_plans(plans)
    rows = table(text, MEMORY)
    assert list(rows) == [*STRATEGIES, "zero3 --cpu_offload"]
    for plan, (*kinds, on_device, in_main_memory) in zip(plans, rows.values(), strict=True):
        assert sum(kinds) == pytest.approx(on_device + in_main_memory, abs=0.5), "rounded numbers"
        assert in_main_memory == pytest.approx(plan.cpu_offload * sum(rows["zero3"][:3]), abs=0.2)
    rows = table(text, TRAFFIC)
    assert list(rows) == list(STRATEGIES)
    for plan, (*kinds, together, leaving) in zip(plans, rows.values(), strict=False):
        if topology.nodes == 1:
            kinds, together, leaving = [*kinds, together], leaving, 0
        collectives = plan_traffic(plan)
        assert sum(kinds) == pytest.approx(together, abs=0.2)
        assert sum(one.sent(topology) for one in collectives) / 2**20 == pytest.approx(together, abs=0.1)
        assert sum(one.leaving(topology) for one in collectives) / 2**20 == pytest.approx(leaving, abs=0.1)


def test_only_the_memory_of_a_gpu_is_known(planned, monkeypatch):
    assert "The memory of the device is unknown" in verdict(describe_plans([planned]))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=16 * 2**20))
    assert "into 16.0 MiB fits: " in describe_plans([replace(planned, device=torch.device("cuda"))])


def test_the_verdict_names_exactly_what_fits(planned):
    plans = planned.with_each_strategy()
    sizes = {plan.flags: needed(plan) for plan in plans}
    assert len({*sizes.values()}) > 2
    for budget in (1, *sizes.values()):
        text = describe_plans(plans, budget)
        names = verdict(text).partition("fits: ")[2]
        fitting = [flags for flags, size in sizes.items() if size <= budget]
        assert re.findall("`(.*?)`", names) == fitting
        assert names.startswith("none") == (not fitting)
        rows = table(text, MEMORY)
        for plan in plans:
            fits, free = int(rows[plan.flags][-1]), budget - largest_memory(plan).on_device
            assert (fits >= plan.batches.micro_size) == (plan.flags in fitting), "2 rows, a power of two"
            assert fits == 0 or plan.activations(fits).peak <= free
            assert plan.activations(max(1, 2 * fits)).peak > free


def test_the_flags_that_the_verdict_names_if_nothing_fits_need_less(planned):
    fixed = {"model": "tiny-bert", "max_length": 64, "train_batch_size": 32, "strategy": "zero3"}
    before, named = needed(build(**fixed)), verdict(describe_plans([planned], 1))
    for less in ({"gradient_accumulation_steps": 4}, {"activation_checkpointing": True}, {"precision": "bf16"}):
        assert f"--{next(iter(less))}" in named
        assert needed(build(**fixed, **less)) < before


@pytest.mark.parametrize("path", [ddp_loop, trainer_run])
def test_a_dry_run_prints_the_plan_of_its_strategy_and_loads_and_writes_nothing(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "build_model", lambda *_: pytest.fail("this run loads weights"))
    with patch.dict(os.environ):  # in which a rank without torchrun leaves its number
        path.main(Settings(**SETTINGS, strategy="zero3", dry_run=True))
    text = capsys.readouterr().out
    assert "8 rows per step = 1 rank(s) x 8 rows x 1 micro-batch(es); 16 tokens per row, fp32" in text
    assert text.count("| zero3 |") == 2, "memory and traffic"
    assert "| ddp |" not in text
    assert not [*tmp_path.iterdir()], "no folder is created"


def test_rank_0_prints_the_dry_run_of_a_resumed_run_with_its_logical_ranks(world, monkeypatch, capsys):
    monkeypatch.setattr(report, "resolve_settings", lambda _, given, __: (replace(given, logical_ranks=4), Resume()))
    report.print_plan("ddp_loop", Settings(**SETTINGS), replace(world, rank=1))
    assert capsys.readouterr().out == ""
    report.print_plan("ddp_loop", Settings(**SETTINGS), world)
    assert "4 logical ranks (on 1 rank(s)) x 2 rows" in capsys.readouterr().out
