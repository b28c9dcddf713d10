"""The memory plan: what it accepts, and that its tables add up."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from app.cli import parse_settings
from app.distributed.world import Topology
from app.plan import __main__ as module
from app.plan.memory import bytes_of
from app.plan.report import describe_plans, largest_memory, needed, verdict
from app.plan.step import Plan, build_plan
from app.plan.traffic import plan_traffic
from app.program import run_program
from app.settings import STRATEGIES, Settings
from app.strategies.base import sharded_groups


def run(monkeypatch, tmp_path, review_csv, *flags: str) -> int:
    monkeypatch.chdir(tmp_path)
    fixed = ["--csv", str(review_csv(90)), "--use_cpu", "--max_length=16", "--train_batch_size=8", "--ranks=2"]
    monkeypatch.setattr(sys, "argv", ["plan", *fixed, *flags])
    return run_program(module.main)


def table(text: str, title: str) -> list[list[str]]:
    """The cells of the table below a title, without its header."""
    lines = text[text.index(title) :].split("\n\n")[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def numbers(cells: Sequence[str]) -> list[float]:
    return [float(cell.replace(",", "")) for cell in cells]


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Plan:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "reviews.csv").write_text("label,review\n" + "".join(f"{i % 2},第{i}次好\n" for i in range(90)))
    settings = Settings(csv=str(folder / "reviews.csv"), use_cpu=True, max_length=16, train_batch_size=8)
    return build_plan(replace(settings, gradient_accumulation_steps=2), Topology(2, 2))


def test_the_plan_is_printed_and_written(planned, monkeypatch, tmp_path, review_csv, capsys):
    monkeypatch.setattr(module, "build_plan", lambda *_: planned)
    assert run(monkeypatch, tmp_path, review_csv, "--output_dir=plan", "--device_memory=16MiB") == 0
    text = Path("plan/plan.md").read_text()
    assert text in capsys.readouterr().out
    assert "8 rows per step = 2 rank(s) x 2 rows x 2 micro-batch(es); 16 tokens per row, fp32" in text
    assert "into 16.0 MiB fits: `ddp`, " in text
    fits = [int(row[-1]) for row in table(text, "## Memory of the rank that needs")]
    assert min(fits) > 4, "more than the micro-batch of the plan"


def test_the_memory_tables_agree(planned):
    text = describe_plans(planned.with_each_strategy())
    parts = {row[0]: numbers(row[1:]) for row in table(text, "## Memory of the rank that needs")}
    assert list(parts) == [*STRATEGIES, "zero3 --cpu_offload"]
    for *kinds, on_device, in_main_memory in parts.values():
        assert sum(kinds) == pytest.approx(on_device + in_main_memory, abs=0.5), "rounded numbers"
    assert parts["zero3"][-1] == 0
    assert parts["zero3 --cpu_offload"][-1] == pytest.approx(sum(parts["zero3"][:3]), abs=0.2)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_sharding_one_block_at_a_time_needs_less_than_a_step(planned, strategy, offload):
    """At the start, the complete model is in main memory; docs/strategies.md says what that needs."""
    complete = [sum(map(bytes_of, group)) for group in sharded_groups(planned.model)]
    for ranks in (1, 2, 16, 1024):
        plan = replace(planned, topology=Topology(ranks, ranks), strategy=strategy, cpu_offload=offload)
        memory = largest_memory(plan)
        assert (0 if offload else memory.parameters) + max(complete) <= memory.on_device


def test_a_plan_for_gpus_that_was_made_without_one_says_so(planned):
    line = "Activations are those of CPU kernels"
    assert line not in describe_plans([planned])
    assert line in describe_plans([replace(planned, settings=replace(planned.settings, use_cpu=False))])


def test_the_verdict_names_exactly_what_fits(planned):
    plans = planned.with_each_strategy()
    sizes = {plan.flags: needed(plan) for plan in plans}
    assert len(set(sizes.values())) > 2
    for budget in sizes.values():
        text = describe_plans(plans, budget)
        names = text.partition("## Verdict")[2].partition("fits: ")[2]
        fitting = [flags for flags, size in sizes.items() if size <= budget]
        assert re.findall("`(.*?)`", names) == fitting
        rows = {row[0]: int(row[-1]) for row in table(text, "## Memory of the rank")}
        for plan in plans:
            fits = rows[plan.flags]
            assert (fits >= plan.batches.micro_size) == (plan.flags in fitting), "2 rows, a power of two"
            free = budget - largest_memory(plan).on_device
            assert fits == 0 or plan.activations(fits).peak <= free
            assert plan.activations(max(1, 2 * fits)).peak > free


def test_without_a_gpu_the_memory_of_the_device_is_unknown(planned, monkeypatch):
    assert "The memory of the device is unknown" in describe_plans([planned]).partition("## Verdict")[2]
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=16 * 2**20))
    assert "into 16.0 MiB fits: " in describe_plans([replace(planned, device=torch.device("cuda"))])


def test_a_model_that_is_too_large_for_the_device_needs_another_batch(planned):
    text = verdict(planned.with_each_strategy(), 1)
    assert "into 0.0 MiB fits: none" in text
    for flag in ("--gradient_accumulation_steps", "--activation_checkpointing", "--precision bf16"):
        assert flag in text


@pytest.mark.parametrize(
    "flags", [["--gradient_accumulation_steps=4"], ["--activation_checkpointing"], ["--precision=bf16"]]
)
def test_the_flags_that_the_verdict_names_need_less(planned, flags):
    fixed = [
        "--csv",
        planned.settings.csv,
        "--use_cpu",
        "--model=tiny-bert",
        "--train_batch_size=32",
        "--strategy=zero3",
    ]
    plain, changed = (build_plan(parse_settings(arguments=[*fixed, *more]), Topology(2, 2)) for more in ([], flags))
    assert needed(changed) < needed(plain)


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(8, 4)])
def test_the_traffic_table_adds_up_the_collectives(planned, topology):
    plans = {plan.strategy: plan for plan in replace(planned, topology=topology).with_each_strategy()}
    text = describe_plans(list(plans.values()))
    totals = {row[0]: numbers(row[1:]) for row in table(text, "## Traffic: what a rank sends")}
    assert list(totals) == list(STRATEGIES)
    assert ("| leaves a node |" in text) == (topology.nodes > 1)
    for strategy, (gradients, parameters, other, together, *leaving) in totals.items():
        assert gradients + parameters + other == pytest.approx(together, abs=0.2)
        collectives = plan_traffic(plans[strategy])
        assert sum(one.sent(topology) for one in collectives) / 2**20 == pytest.approx(together, abs=0.1)
        if leaving:
            assert sum(one.leaving(topology) for one in collectives) / 2**20 == pytest.approx(leaving[0], abs=0.1)


def test_the_plan_uses_the_shapes_of_the_logical_ranks(review_csv, tmp_path, monkeypatch):
    def plan(**changes: object) -> Plan:
        settings = Settings(csv=str(review_csv(90)), use_cpu=True, max_length=16, train_batch_size=16, **changes)
        return build_plan(settings, Topology(2, 2))

    monkeypatch.chdir(tmp_path)
    plain, shared = plan(), plan(logical_ranks=8, ddp_bucket_cap_mb=1)
    assert (plain.batches.micro_size, shared.batches.micro_size) == (8, 2)
    assert largest_memory(plain).partial_sums == 0
    assert largest_memory(shared).partial_sums == 2 * largest_memory(shared).gradients
    sharded = [replace(plan, strategy="zero3") for plan in (plain, shared)]
    gathers = [sum(c.times for c in plan_traffic(one) if c.purpose == "parameters") for one in sharded]
    assert gathers[1] == 4 * gathers[0]


def test_measuring_starts_the_benchmarks_with_the_same_settings(monkeypatch, tmp_path, review_csv, capsys):
    monkeypatch.setattr(module, "describe_plans", lambda *_, **__: "the plan")
    started = []
    monkeypatch.setattr(module, "run_job", lambda *arguments: started.append(arguments) or 0)
    assert run(monkeypatch, tmp_path, review_csv, "--measure", "--threads=1") == 0
    assert [name for name, _, _ in started] == ["app.bench.memory", "app.bench.traffic"]
    for _, settings, ranks in started:
        assert (settings.threads, settings.max_length, ranks) == (1, 16, 2)
    monkeypatch.setattr(module, "run_job", lambda *_: 1)
    assert run(monkeypatch, tmp_path, review_csv, "--measure") == 1
    assert "error: app.bench.memory failed with exit status 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks=0"], "error: argument --ranks: 0: must be a whole number, 1 or more"),
        (["--ranks_per_node=0"], "error: argument --ranks_per_node: 0: must be a whole number, 1 or more"),
        (["--ranks=8", "--ranks_per_node=3"], "error: --ranks_per_node 3: must divide --ranks 8"),
        (["--measure", "--ranks_per_node=1"], "error: --measure: "),
        (["--device_memory=24"], "error: --device_memory 24: must be a number with a unit, such as 24GiB or 80GB"),
        (["--ranks=3"], "error: --train_batch_size 8 cannot be divided among 3 rank(s)"),
        (["--device_memory=0GiB"], "error: --device_memory 0GiB: must be a number with a unit"),
        (["--model=missing"], "error: "),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_folder(monkeypatch, tmp_path, review_csv, capsys, flags, message):
    assert run(monkeypatch, tmp_path, review_csv, *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)
    assert not (tmp_path / "runs").exists()
