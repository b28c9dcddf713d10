"""Steps under zero1, zero2 and zero3, predicted from the collectives that app.plan counts, and GPUs for the jobs."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from app.bench.alpha_beta import AlphaBeta
from app.bench.page import Table, as_markdown
from app.bench.scaling import __main__ as scaling
from app.bench.scaling import configuration, task_job
from app.bench.scaling.cluster_section import ClusterFlags
from app.bench.scaling.configuration import Alone, Configuration, ScalingPlan
from app.bench.scaling.measure import ALL_REDUCE_SIZES, Measurement, Round
from app.bench.scaling.predict import Cores, fit
from app.bench.scaling.report import raw_data, sections
from app.bench.scaling.strategies import plan_strategies, predict_strategy, seconds_of, updated_share
from app.bench.steps import bert_config
from app.common.errors import UserError
from app.plan.step import Plan
from app.plan.traffic import Collective
from app.program import run_program
from app.strategies.base import sharded_groups

NAME = "BERT 4 x 312"
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
PLAN = ScalingPlan(NAME, [1, 2, 4], [], 32, 8, 64, 3, 3, threads=1, strategies=STRATEGIES)
MIB = 2**20
UPDATE = 0.08
LINES = {
    "local": (0.001, 1e-9),
    "all-gather": (0.002, 0.5e-9),
    "all-to-all": (0.004, 0.7e-9),
    "broadcast": (0.008, 3e-10),
}


@pytest.fixture(scope="module")
def model() -> Plan:
    return plan_strategies(bert_config(NAME), 64, use_cpu=True)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(configuration, "usable_cores", lambda: {0, 1})


def line(alpha: float, beta: float) -> AlphaBeta:
    return AlphaBeta(alpha, beta, 0.0, 0.0, 0.0, 0.0, 0.0, 5)


def alone(rows: int, strategy: str) -> dict[str, Any]:
    """Two ranks: the backward pass ends after 0.02 s per row, and the update takes 80 ms, or what is left of it."""
    backward = 0.02 * rows
    if strategy in ("zero2", "zero3"):
        return {"seconds": backward + UPDATE, "buckets": []}
    return {"seconds": backward + UPDATE, "buckets": [(MIB, backward / 2), (50 * MIB, backward)]}


def synthetic_round() -> Round:
    found: Round = {key: Measurement({"seconds": 1.0 / key.ranks}, 0.0) for key in PLAN.configurations(False)}
    for rows in (8, 16):
        found |= {Alone(rows, strategy): Measurement(alone(rows, strategy), 0.0) for strategy in STRATEGIES}
    for name, (alpha, beta) in LINES.items():
        points = [{"bytes": n, "seconds": alpha + n * beta, "cpu_seconds": 1e-9} for n in ALL_REDUCE_SIZES]
        found[name] = Measurement(points, 0.0)
    return found


@pytest.mark.parametrize(
    ("operation", "ranks", "seconds"),
    [
        ("all-gather", 2, 0.5 + 1.0),  # as measured
        ("all-gather", 4, 2 * (3 * 0.5 + 1.5)),  # three messages, half as many bytes again, on half a core
        ("all-to-all", 4, 2 * (3 * 0.5 + 1.5)),
        ("broadcast", 4, 2 * (2 * 0.5 + 1.5)),  # a tree has two levels
    ],
)
def test_a_collective_of_more_ranks_by_hand(operation, ranks, seconds):
    collective = Collective("parameters", "block 1", operation, size=100, times=2)
    cores = Cores(cores=2, ranks=ranks)
    assert seconds_of(collective, line(0.5, 0.01), cores) == pytest.approx(2 * seconds)


def test_ranks_update_a_share_of_the_parameters(model):
    assert updated_share(model, "ddp", 4) == 1
    assert updated_share(model, "zero3", 4) == pytest.approx(0.25, rel=1e-3)
    assert updated_share(model, "zero1", 2) >= 0.5


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_sharded_step_waits_for_each_of_its_collectives(model, strategy):
    fits = fit([synthetic_round()], 2, 1)
    two = predict_strategy(Configuration("weak", 2, 8, None, strategy), fits, model, cores=2, threads=1)
    groups = sharded_groups(model.model)
    n = len(groups)
    # The padding of rows is negligible.
    size, rest = (sum(4 * parameter.numel() for parameter in group) for group in (model.model.parameters(), groups[-1]))
    # zero3 gathers all but the parameters outside of all blocks twice.
    gathers, gathered_size = (n, size) if strategy == "zero2" else (2 * n - 1, 2 * size - rest)
    gathered = gathers * 0.002 + gathered_size * 0.5e-9
    reduced = n * 0.004 + size * 0.7e-9
    assert two.middle == pytest.approx(0.16 + UPDATE + gathered + reduced, rel=1e-3)
    assert two.low <= two.middle <= two.high
    four = predict_strategy(Configuration("weak", 4, 8, None, strategy), fits, model, cores=2, threads=1)
    gathered = 3 * gathers * 0.002 + 1.5 * gathered_size * 0.5e-9
    reduced = 3 * n * 0.004 + 1.5 * size * 0.7e-9
    # The update of a half took two ranks 80 ms, as long as the complete one: a quarter takes 20 ms less.
    assert four.middle == pytest.approx(2 * (0.16 + UPDATE - 0.25 * UPDATE + gathered + reduced), rel=1e-3)


def test_zero1_is_ddp_and_broadcasts_of_the_updated_parameters(model):
    fits = fit([synthetic_round()], 2, 1)
    ddp, zero1 = (
        predict_strategy(Configuration("weak", 2, 8, None, strategy), fits, model, cores=2, threads=1).middle
        for strategy in ("ddp", "zero1")
    )
    size = sum(4 * parameter.numel() for parameter in model.model.parameters())
    assert zero1 - ddp == pytest.approx(2 * 0.008 + size * 3e-10, rel=1e-3)


def test_the_table_has_every_strategy_and_number_of_ranks(model):
    rounds = [synthetic_round()]
    fits = fit(rounds, 2, 1)
    flags = ClusterFlags(8, None, None, batch=64)
    report = sections(PLAN, rounds, fits, flags=flags, model=model)
    assert [section.name for section in report] == ["one_node", "strategies", "inputs", "cluster"]
    strong, weak = (part for part in report[1].parts if isinstance(part, Table))
    assert [row[:2] for row in strong.rows] == [[name, str(n)] for name in STRATEGIES for n in (1, 2, 4)]
    cells = dict(zip(strong.header, strong.rows[-1], strict=True))
    assert cells["speedup"] == "4.00"
    assert cells["efficiency"] == "100%"
    assert cells["examples/s"] == "128.0", "32 rows in a quarter of a second"
    assert cells["published"] == "3.2"
    assert float(cells["MiB"].replace(",", "")) < float(strong.rows[2][-2].replace(",", ""))
    assert dict(zip(weak.header, weak.rows[1], strict=True))["published"] == "1.85"
    text = as_markdown(report[2])
    assert "all-to-all, one node" in text
    assert "zero3" in text
    data = raw_data(PLAN, rounds, fits, report=report)
    assert data["fits"]["computation"].keys() == {
        f"{prefix}{rows}" for prefix in ("", "zero1, ", "zero2, ", "zero3, ") for rows in (8, 16)
    }


@pytest.fixture
def four_gpus(monkeypatch):
    """The plans that jobs would be opened with, on a machine with four GPUs; nothing is measured."""
    plans = []

    @contextmanager
    def open_jobs(plan, folder):
        plans.append(plan)
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(scaling, "count_gpus", lambda use_cpu: 0 if use_cpu else 4)
    monkeypatch.setattr(scaling, "open_jobs", open_jobs)
    return plans


def start(monkeypatch, tmp_path, *flags) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["scaling", "--output_dir", str(tmp_path / "out"), *flags])


def test_ranks_use_all_gpus(four_gpus, monkeypatch, tmp_path):
    start(monkeypatch, tmp_path)
    assert run_program(scaling.main) == 130
    assert (four_gpus[0].ranks, four_gpus[0].links, four_gpus[0].gpus) == ([1, 2, 4], [], 4)
    assert Cores(four_gpus[0].n_cores, 4).slowdown == 1
    assert Cores(four_gpus[0].n_cores, 4).displaced == 0


def test_use_cpu_ignores_gpus(four_gpus, monkeypatch, tmp_path):
    start(monkeypatch, tmp_path, "--use_cpu")
    assert run_program(scaling.main) == 130
    assert (four_gpus[0].ranks, len(four_gpus[0].links), four_gpus[0].gpus) == ([1, 2, 4, 8], 6, 0)
    assert four_gpus[0].n_cores == 2


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--ranks", "8"], "--ranks 8: this machine has 4 GPU(s)"),
        (["--links", "1:1"], "--links: two nodes on one machine share its CPU, but there are GPUs: add --use_cpu"),
    ],
)
def test_what_gpus_cannot_do_is_one_line(flags, problem, four_gpus, monkeypatch, tmp_path, capsys):
    start(monkeypatch, tmp_path, *flags)
    assert run_program(scaling.main) == 2
    assert problem in capsys.readouterr().err
    assert not four_gpus


def test_models_that_do_not_fit_are_one_line_before_anything_starts(model, monkeypatch):
    zero3 = ScalingPlan(NAME, [4], [], 32, 8, 64, 3, 3, threads=1, strategies=("ddp", "zero3"))
    # Twice with two ranks, with and without exchange, and once with four.
    needed = sum(
        copies * memory.total
        for copies, ranks in ((2, 2), (1, 4))
        for strategy in zero3.strategies
        for memory in model.memory(strategy, ranks)
    )
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=needed))
    scaling.check_memory(zero3, model)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=needed - 1))
    with pytest.raises(UserError, match="--strategies: 2 models on each rank of all jobs take"):
        scaling.check_memory(zero3, model)
    scaling.check_memory(replace(zero3, gpus=4), model)


@pytest.mark.parametrize(("gpus", "use_cpu"), [(0, True), (4, False)])
def test_a_job_uses_the_cpu_only_where_there_is_no_gpu(gpus, use_cpu, monkeypatch, tmp_path):
    commands = []

    def job(command, **options):
        commands.append(command)
        return nullcontext(SimpleNamespace())

    monkeypatch.setattr(task_job, "TorchrunJob", job)
    plan = ScalingPlan(NAME, [2], [], 32, 8, 64, 3, 3, threads=1, gpus=gpus)
    with task_job.task_job(plan, 2, log=tmp_path / "log"):
        assert ("--use_cpu" in commands[0]) == use_cpu
        assert "--nproc_per_node=2" in commands[0]
