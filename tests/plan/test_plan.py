"""The memory plan: its tables add up, and what it says fits.

tests/test_mistakes_in_laboratories.py has the mistakes in its command line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.jobs import write_reviews

from app.distributed.world import Topology
from app.plan import __main__ as module
from app.plan.report import describe_plans, largest_memory, needed
from app.plan.step import Plan, build_plan
from app.plan.traffic import plan_traffic
from app.program import run_program
from app.settings import STRATEGIES, Settings


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Callable[..., Plan]:
    """A function that plans a step with some settings on two ranks."""
    csv = tmp_path_factory.mktemp("plan") / "reviews.csv"
    write_reviews(csv, 90)

    def build(**changes: object) -> Plan:
        settings = {"csv": str(csv), "use_cpu": True, "max_length": 16, "train_batch_size": 8} | changes
        return build_plan(Settings(**settings), Topology(2, 2))

    return build


@pytest.fixture(scope="module")
def planned(build) -> Plan:
    return build(gradient_accumulation_steps=2)


@pytest.fixture
def run(planned, monkeypatch, tmp_path) -> Callable[..., int]:
    """Call app.plan with some flags: `run("--measure")` returns its exit status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "build_plan", lambda *_: planned)

    def run(*flags: str) -> int:
        monkeypatch.setattr(sys, "argv", ["plan", "--use_cpu", "--max_length=16", "--ranks=2", *flags])
        return run_program(module.main)

    return run


def table(text: str, title: str) -> dict[str, list[float]]:
    """The numbers of each strategy in the table below a title."""
    lines = text[text.index(title) :].split("\n\n")[1].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {name: [float(cell.replace(",", "")) for cell in cells] for name, *cells in rows}


def memory_table(plans: Sequence[Plan], budget: int | None = None) -> dict[str, list[float]]:
    return table(describe_plans(plans, budget), "## Memory of the rank that needs")


# ---- the tables -----------------------------------------------------------------------------------------------------


def test_the_plan_is_printed_and_written(run, capsys):
    assert run("--output_dir=plan", "--device_memory=16MiB") == 0
    text = Path("plan/plan.md").read_text()
    assert text in capsys.readouterr().out
    assert "8 rows per step = 2 rank(s) x 2 rows x 2 micro-batch(es); 16 tokens per row, fp32" in text
    assert "into 16.0 MiB fits: `ddp`, " in text
    rows_that_fit = min(row[-1] for row in table(text, "## Memory of the rank that needs").values())
    assert rows_that_fit > 4, "more than the micro-batch of the plan"


def test_the_memory_tables_agree(planned):
    rows = memory_table(planned.with_each_strategy())
    assert list(rows) == [*STRATEGIES, "zero3 --cpu_offload"]
    for *kinds, on_device, in_main_memory in rows.values():
        assert sum(kinds) == pytest.approx(on_device + in_main_memory, abs=0.5), "rounded numbers"
    assert rows["zero3"][-1] == 0
    assert rows["zero3 --cpu_offload"][-1] == pytest.approx(sum(rows["zero3"][:3]), abs=0.2)


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(8, 4)])
def test_the_traffic_table_adds_up_the_collectives(planned, topology):
    plans = replace(planned, topology=topology).with_each_strategy()
    rows = table(describe_plans(plans), "## Traffic: what a rank sends")
    assert list(rows) == list(STRATEGIES)
    for plan, (gradients, parameters, other, together, *leaving) in zip(plans, rows.values(), strict=False):
        assert gradients + parameters + other == pytest.approx(together, abs=0.2)
        collectives = plan_traffic(plan)
        assert sum(one.sent(topology) for one in collectives) / 2**20 == pytest.approx(together, abs=0.1)
        expected = [sum(one.leaving(topology) for one in collectives) / 2**20] if topology.nodes > 1 else []
        assert leaving == pytest.approx(expected, abs=0.1)


def test_the_plan_uses_the_shapes_of_the_logical_ranks(build):
    plain, shared = build(train_batch_size=16), build(train_batch_size=16, logical_ranks=8)
    assert (plain.batches.micro_size, shared.batches.micro_size) == (8, 2)
    assert largest_memory(plain).partial_sums == 0
    assert largest_memory(shared).partial_sums == 2 * largest_memory(shared).gradients
    sharded = [replace(plan, strategy="zero3") for plan in (plain, shared)]
    gathers = [sum(c.times for c in plan_traffic(one) if c.purpose == "parameters") for one in sharded]
    assert gathers[1] == 4 * gathers[0]


def test_a_plan_for_gpus_that_was_made_without_one_says_so(planned):
    line = "Activations are those of CPU kernels"
    assert line not in describe_plans([planned])
    assert line in describe_plans([replace(planned, settings=replace(planned.settings, use_cpu=False))])


# ---- the verdict ----------------------------------------------------------------------------------------------------


def test_the_verdict_names_exactly_what_fits(planned):
    plans = planned.with_each_strategy()
    sizes = {plan.flags: needed(plan) for plan in plans}
    assert len({*sizes.values()}) > 2
    for budget in (1, *sizes.values()):
        names = describe_plans(plans, budget).partition("## Verdict")[2].partition("fits: ")[2]
        fitting = [flags for flags, size in sizes.items() if size <= budget]
        assert re.findall("`(.*?)`", names) == fitting
        assert names.startswith("none") == (not fitting)
        rows = memory_table(plans, budget)
        for plan in plans:
            fits = int(rows[plan.flags][-1])
            assert (fits >= plan.batches.micro_size) == (plan.flags in fitting), "2 rows, a power of two"
            free = budget - largest_memory(plan).on_device
            assert fits == 0 or plan.activations(fits).peak <= free
            assert plan.activations(max(1, 2 * fits)).peak > free


def test_without_a_gpu_the_memory_of_the_device_is_unknown(planned, monkeypatch):
    assert "The memory of the device is unknown" in describe_plans([planned]).partition("## Verdict")[2]
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=16 * 2**20))
    assert "into 16.0 MiB fits: " in describe_plans([replace(planned, device=torch.device("cuda"))])


LESS = {"gradient_accumulation_steps": 4, "activation_checkpointing": True, "precision": "bf16"}


@pytest.mark.parametrize(("name", "value"), LESS.items())
def test_the_flags_that_the_verdict_names_if_nothing_fits_need_less(planned, build, name, value):
    assert f"--{name}" in describe_plans([planned], 1).partition("## Verdict")[2]
    fixed = {"model": "tiny-bert", "max_length": 128, "train_batch_size": 32, "strategy": "zero3"}
    assert needed(build(**fixed, **{name: value})) < needed(build(**fixed))


# ---- --measure ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 1])
def test_measuring_starts_the_benchmarks_with_the_same_settings(run, monkeypatch, capsys, status):
    started = []
    monkeypatch.setattr(module, "run_job", lambda *arguments: started.append(arguments) or status)
    assert run("--measure", "--threads=1") == status
    assert [name for name, _, _ in started] == ["app.bench.memory", "app.bench.traffic"][: 2 - status]
    for _, settings, ranks in started:
        assert (settings.threads, settings.max_length, ranks) == (1, 16, 2)
    failed = "error: app.bench.memory failed with exit status 1\n"
    assert capsys.readouterr().err == (failed if status else "")
