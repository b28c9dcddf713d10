"""The flags of app.bench.scaling, and its report from synthetic measurements."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import namedtuple
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from app.bench.link.nodes import NamespacesUnavailable
from app.bench.page import Table, as_html, as_markdown
from app.bench.scaling import __main__ as scaling
from app.bench.scaling import configuration
from app.bench.scaling import measure as scaling_measure
from app.bench.scaling.cluster_section import ClusterFlags
from app.bench.scaling.configuration import Alone, Configuration, Hop, ScalingPlan
from app.bench.scaling.gloo_ring import simulate_ring
from app.bench.scaling.measure import ALL_REDUCE_SIZES, Measurement, Round, measure, open_jobs
from app.bench.scaling.predict import fit, measured_interval, predict, rounds_used, usable_results
from app.bench.scaling.report import raw_data, sections
from app.common.link import Link
from app.program import run_program

MIB = 2**20
PLAN = ScalingPlan("BERT 4 x 312", [1, 2, 4], [Link(1, 5)], 32, 8, 64, 3, 3, threads=1)
pytestmark = pytest.mark.usefixtures("two_cores")
CLUSTER = ClusterFlags(8, Hop(10e-6, 8 / 100e9), None, batch=1024)
FORWARD, UPDATE, PER_ROW = 0.01, 0.05, 0.025  # seconds
LOCAL, LINK = (0.001, 1e-9), (0.002, 1.5e-9)  # α and β


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(configuration, "usable_cores", lambda: {0, 1})


def computation(rows: int) -> dict[str, Any]:
    backward = FORWARD + PER_ROW * rows
    return {
        "seconds": backward + UPDATE,
        "buckets": [(2 * MIB, backward / 2), (50 * MIB, backward)],
    }


def all_reduces(alpha: float, beta: float) -> list[dict[str, float]]:
    return [{"bytes": n, "seconds": alpha + n * beta, "cpu_seconds": (alpha + n * beta) / 2} for n in ALL_REDUCE_SIZES]


def true_step(key: Configuration) -> float:
    """The time of a step on two cores, as a formula. The small bucket's exchange is always hidden."""
    slowdown = max(1, key.ranks / 2)
    if key.ranks == 1:
        return computation(key.rows)["seconds"]
    if key.link is None:
        messages, share = key.ranks - 1, 2 * (key.ranks - 1) / key.ranks
        hidden, exposed = (messages * LOCAL[0] + share * n * LOCAL[1] for n in (2 * MIB, 50 * MIB))
        return slowdown * (computation(key.rows)["seconds"] + hidden / 2 + exposed)
    hidden = (LINK[0] + 2 * MIB * LINK[1]) / 2
    exchange = LINK[0] + simulate_ring([0.0], [50 * MIB], key.link, software=LINK[1])[0]
    return computation(key.rows)["seconds"] + hidden + exchange


def synthetic_round(noise: float = 1.0, others: float = 0.0) -> Round:
    found: Round = {key: Measurement({"seconds": true_step(key) * noise}, others) for key in PLAN.configurations(True)}
    for rows in (8, 16):
        found[Alone(rows)] = Measurement(computation(rows), others)
    found["local"] = Measurement(all_reduces(*LOCAL), others)
    found["link"] = Measurement(all_reduces(*LINK), others)
    return found


@pytest.mark.parametrize("key", [key for key in PLAN.configurations(True) if key.ranks > 1], ids=str)
def test_a_machine_that_follows_the_model_is_predicted_exactly(key):
    predicted = predict(key, fit([synthetic_round()] * 3, cores=2, threads=1), cores=2, threads=1)
    assert predicted.middle == pytest.approx(true_step(key), rel=1e-6)
    assert predicted.low <= predicted.middle * 1.000001
    assert predicted.high >= predicted.middle * 0.999999


def test_steps_by_hand():
    fits = fit([synthetic_round()] * 3, cores=2, threads=1)
    # Four ranks on two cores take twice as long: 0.26 s of computation, half of the small bucket's exchange (3.145728 +
    # 3 ms, hidden, but it takes CPU time), and the large bucket's: 3 ms and 1.5 x 52.4288 ms.
    four = predict(Configuration("weak", 4, 8), fits, cores=2, threads=1)
    assert four.middle == pytest.approx(2 * (0.26 + 0.006145728 / 2 + 0.0816432))
    # 0.26 s; half of 2 + 3.145728 ms; 2 ms, and 50 segments, each of which takes 8.388608
    # ms on the link, one delay, and half of the software's 1.572864 ms.
    nodes = predict(Configuration("weak", 2, 8, Link(1, 5)), fits, cores=2, threads=1)
    segments = 50 * (0.008388608 + 0.005 + 0.000786432)
    assert nodes.middle == pytest.approx(0.26 + 0.005145728 / 2 + 0.002 + segments, rel=0.003)


@pytest.mark.parametrize(("cores", "threads"), [(2, 2), (1, 1)])
def test_cores_that_two_ranks_share_while_they_are_measured_do_not_count_twice(cores, threads):
    """As measured: 0.26 s, half of the small bucket's exchange, because no core is idle, and the large bucket's."""
    fits = fit([synthetic_round()] * 3, cores, threads)
    assert fits.slowdown == 2
    assert fits.computation[Alone(8)].seconds == pytest.approx(0.13), "with a core for each thread"
    two = predict(Configuration("weak", 2, 8), fits, cores=cores, threads=threads)
    # CPU time is no waiting time, so it is not converted; it displaces twice as much of a computation that shares.
    assert two.middle == pytest.approx(0.26 + 2 * (0.001 + 0.002097152) / 2 + 0.001 + 0.0524288)
    four = predict(Configuration("weak", 4, 8), fits, cores=cores, threads=threads)
    assert four.middle == pytest.approx(2 * (0.26 + 0.006145728 + 0.0816432))


def test_disturbed_rounds_are_left_out():
    key = PLAN.configurations(False)[0]
    rounds = [synthetic_round(1.0), synthetic_round(3.0, others=0.5), synthetic_round(1.1)]
    assert measured_interval(key, rounds).high == pytest.approx(1.1 * true_step(key))
    rounds = [synthetic_round(2.0, others=0.9), synthetic_round(3.0, others=0.5)]
    found = [one["seconds"] for one in usable_results(rounds, key)]
    assert found == [2.0 * true_step(key), 3.0 * true_step(key)], "all, because there is no other"


def test_the_report_shows_how_many_rounds_a_row_is_based_on():
    calm, disturbed = synthetic_round(), synthetic_round(others=0.5)
    assert rounds_used([calm, disturbed, calm], "local") == "2 of 3"
    assert rounds_used([disturbed, disturbed], "local") == "all 2, disturbed"
    report = sections(PLAN, [calm, disturbed], fit([calm, disturbed], 2, 1), flags=CLUSTER)
    for section in report[:3]:
        for table in section.parts:
            if isinstance(table, Table):
                assert {row[list(table.header).index("rounds")] for row in table.rows} == {"1 of 2"}


def test_other_processes_are_those_on_the_cores_of_this_process(monkeypatch):
    Times = namedtuple("Times", ["user", "idle"])
    monkeypatch.setattr(
        scaling_measure.psutil, "cpu_times", lambda percpu: [Times(float(10**n), 7.0) for n in range(4)]
    )
    monkeypatch.setattr(scaling_measure, "usable_cores", lambda: {1, 3})
    assert scaling_measure.busy_seconds() == 1010


def test_the_report_marks_what_is_measured_and_what_is_predicted():
    rounds = [synthetic_round(noise) for noise in (0.98, 1.0, 1.02)]
    fits = fit(rounds, 2, 1)
    report = sections(PLAN, rounds, fits, flags=CLUSTER)
    page = as_html("Scaling", {}, report, json_name="scaling.json")
    assert "<script" not in page
    assert "scaling.json in full precision" in page
    assert page.count("<svg") == 2 + 2 + 4
    text = " ".join(" ".join(map(as_markdown, report)).split())
    assert "1 Gbit/s, 5 ms" in text
    assert "100 Gbit/s" not in text
    assert "10 µs per message and 12.5 GB/s (as given)" in text
    assert "1,024" in text
    data = json.loads(json.dumps(raw_data(PLAN, rounds, fits, report=report), allow_nan=False))
    four = data["sections"]["one_node"]["weak, 4 rank(s), one node"]
    assert four["measured"]["low"] < four["measured"]["middle"] < four["measured"]["high"]
    assert four["predicted"]["middle"] == pytest.approx(four["measured"]["middle"])
    assert set(data["sections"]["cluster"]["weak"]) == {"ring", "tree", "hierarchical"}
    assert set(map(int, data["sections"]["cluster"]["strong"]["ring"])) == {2**n for n in range(11)}


def test_a_measured_efficiency_above_100_percent_is_explained():
    slow_start = synthetic_round()
    one = Configuration("strong", 1, 32)
    slow_start[one] = Measurement({"seconds": 3 * true_step(one)}, 0.0)
    strong, weak = (
        part
        for part in sections(PLAN, [slow_start], fit([slow_start], 2, 1), flags=CLUSTER)[0].parts
        if isinstance(part, Table)
    )
    speedup, efficiency = strong.rows[1][-2:]
    assert float(speedup) > 2
    assert efficiency == "100%"
    assert "the steps of one rank were disturbed" in strong.note
    assert weak.note == ""


def test_without_nodes_and_with_one_number_of_ranks_there_is_a_report():
    plan = ScalingPlan("BERT 4 x 312", [2], [], 32, 8, 64, 3, 3, threads=1)
    whole = synthetic_round()
    kept = {key: one for key, one in whole.items() if key != "link" and not isinstance(key, Configuration)}
    kept |= {key: whole[key] for key in plan.configurations(False)}
    report = sections(plan, [kept], fit([kept], 2, 1), flags=CLUSTER)
    assert [section.name for section in report] == ["one_node", "inputs", "cluster"]
    between = replace(CLUSTER, link=None)
    text = " ".join(as_markdown(sections(plan, [kept], fit([kept], 2, 1), flags=between)[-1]).split())
    assert "1 GB/s (not measured: assumed to be as fast as within this machine)" in text
    text = " ".join(as_markdown(sections(PLAN, [whole], fit([whole], 2, 1), flags=between)[-1]).split())
    assert "0.667 GB/s (measured over the unshaped link)" in text


def test_a_line_whose_bytes_take_no_time_has_no_bandwidth():
    found = synthetic_round()
    for key, (alpha, _) in (("local", LOCAL), ("link", LINK)):
        found[key] = Measurement(all_reduces(alpha, 0.0), others=0.0)
    fits = fit([found], 2, 1)
    assert fits.local.beta == 0
    report = sections(PLAN, [found], fits, flags=replace(CLUSTER, link=None))
    assert "500 µs per message and – (measured on this machine)" in " ".join(as_markdown(report[-1]).split())


def test_nodes_of_a_cluster_are_complete():
    rounds = [synthetic_round()]
    cluster = sections(PLAN, rounds, fit(rounds, 2, 1), flags=replace(CLUSTER, ranks_per_node=6))[-1]
    assert list(map(int, cluster.data["strong"]["ring"])) == [1, 2, 4, 6, 12, 24, 48, 96, 192, 384, 768]


class FakeJob:
    """A job whose steps take one second per row, and 2 s more if gradients are exchanged."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.open = ranks, True

    def connect(self) -> None:
        pass

    def perform(self, **task: Any) -> Any:
        assert self.open
        if "sizes" in task:
            return [{"bytes": n, "seconds": 1.0, "cpu_seconds": 1.0} for n in task["sizes"]]
        return {"seconds": task["rows"] + 2.0 * task["exchange"], "ranks": self.ranks}

    def cpu_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        self.open = False

    def wait(self) -> None:
        assert not self.open


@pytest.fixture
def no_namespaces(monkeypatch):
    """Jobs are fakes, and there are no network namespaces."""

    @contextmanager
    def task_job(plan, ranks, *_, **__):
        yield FakeJob(ranks)

    @contextmanager
    def shaped_link():
        raise NamespacesUnavailable("not root")
        yield

    monkeypatch.setattr(scaling_measure, "task_job", task_job)
    monkeypatch.setattr(scaling_measure, "shaped_link", shaped_link)


def test_without_root_two_nodes_are_left_out_with_a_line(no_namespaces, tmp_path, capsys):
    with open_jobs(PLAN, tmp_path) as jobs:
        rounds = measure(PLAN, jobs)
    assert capsys.readouterr().out == "not measured: two nodes: not root\n"
    assert len(rounds) == PLAN.rounds
    for one in rounds:
        assert set(one) == {Alone(8), Alone(16), "local", *PLAN.configurations(links=False)}
        for key in PLAN.configurations(links=False):
            assert one[key].result == {"seconds": key.rows + 2.0, "ranks": key.ranks}
        assert one[Alone(16)].result == {"seconds": 16.0, "ranks": 2}


def test_a_cluster_needs_two_numbers_of_rows(no_namespaces, tmp_path):
    plan = replace(PLAN, ranks=[1, 2], links=[], rows=16)
    with open_jobs(plan, tmp_path) as jobs:
        assert {Alone(16), Alone(32)} <= set(measure(plan, jobs)[0])


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--ranks", "0"], "--ranks: 0: must be a whole number, 1 or more"),
        (["--ranks", "3"], "--train_batch_size 32 cannot be divided among 3 ranks"),
        (["--ranks", "128", "--train_batch_size", "128"], "--ranks 128: at most 64 on one machine"),
        (["--links", "fast"], "--links: fast: must be Gbit/s:milliseconds, such as 1:5"),
        (["--links", "1"], "--links: 1: must be Gbit/s:milliseconds, such as 1:5"),
        (["--links", "1:-1"], "--links: 1:-1: must be Gbit/s:milliseconds, such as 1:5"),
        (["--links", "0:1"], "--links: 0:1: must be Gbit/s:milliseconds, such as 1:5"),
        (["--links", "1:nan"], "--links: 1:nan: must be Gbit/s:milliseconds, such as 1:5"),
        (["--steps", "many"], "--steps: many: must be a whole number, 1 or more"),
        (["--length", "513"], "--length 513: must be at most 512"),
        (["--link_gbit", "100"], "--link_gbit and --link_latency_us: give both or neither"),
        (["--node_latency_us", "1"], "--node_gbit and --node_latency_us: give both or neither"),
        (["--link_gbit", "-1", "--link_latency_us", "1"], "--link_gbit/--link-gbit: -1: must be a number above 0"),
        (["--model", "./huge"], "--model ./huge: "),
        (["--parameters", "6e7"], "--parameters: give --step_ms or --profile, too"),
        (["--step_ms", "250"], "--step_ms: add --parameters"),
        (["--step_ms", "250", "--parameters", "0.5"], "--parameters 0.5: must be from 1 to 1e+12"),
        (["--step_ms", "250", "--profile", "runs"], "--step_ms and --profile exclude each other"),
        (["--step_ms", "250", "--parameters", "6e7", "--ranks", "2"], "--ranks: with --step_ms, nothing is measured"),
        (["--profile", "nowhere", "--parameters", "6e7"], "--profile nowhere: [Errno 2] No such file"),
        (["--straggler_percent", "60"], "--straggler_percent/--straggler-percent: 60: must be from 0 to 50"),
        (["--speed", "1"], "unknown argument --speed 1"),
    ],
)
def test_a_mistake_is_one_line(flags, problem, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["scaling", *flags])
    assert run_program(scaling.main) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert problem in err
    assert not any(tmp_path.iterdir())


def test_a_temporary_folder_with_a_long_name_is_one_line_and_leaves_no_folder(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["scaling"])
    monkeypatch.setattr(tempfile, "gettempdir", lambda: f"/{'x' * 80}")
    assert run_program(scaling.main) == 2
    assert capsys.readouterr().err.startswith("error: TMPDIR /xxx")
    assert not list(tmp_path.iterdir())
