"""`app.check`: where the ranks are, and whether they reach each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.two_nodes import ip, start, wait_for_all

from app.bench.two_nodes import ADDRESSES

pytestmark = pytest.mark.launched
PORT = "29500"


@pytest.mark.slow
def test_two_ranks_are_listed_in_order_and_train_together(launch):
    done = launch("app.check", "--use_cpu", ranks=2)
    assert done.status == 0, done.err
    lines = [line.split(maxsplit=1) for line in done.out.splitlines()]
    assert [name for name, _ in lines] == ["ranks", "rank", "rank", "all-reduce", "toy"]
    assert re.fullmatch(r"2 on 1 node\(s\), which meet at \S+:\d+", lines[0][1])
    for rank in range(2):
        assert re.fullmatch(
            rf"{rank}  local rank {rank} of 2, \S+, cpu, \S+ \(\S+\), torch \S+, gloo", lines[1 + rank][1]
        )
    assert re.search(r"correct sum: \d+\.\d ms the first time", lines[3][1])
    assert "equal weights afterwards" in lines[4][1]


def check(nodes: list[str], folder: Path, *flags: str, **environment: str) -> tuple[list[int | None], list[str]]:
    """Run app.check on both nodes; return their statuses, and what they printed."""
    logs = [folder / f"node{rank}.log" for rank in range(2)]
    jobs = [
        start(nodes, rank, "static", "app.check", "--use_cpu", *flags, log=log, **environment)
        for rank, log in enumerate(logs)
    ]
    wait_for_all(jobs, 150)
    return [job.poll() for job in jobs], [log.read_text() for log in logs]


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
def test_the_ranks_of_both_nodes_are_listed(nodes, tmp_path):
    statuses, printed = check(nodes, tmp_path, NPROC_PER_NODE="2")
    assert statuses == [0, 0], "\n".join(printed)
    places = re.findall(r"rank (\d)  local rank (\d) of 2, \S+, cpu, (\S+) \(cable\)", printed[0])
    assert places == [(str(rank), str(rank % 2), ADDRESSES[rank // 2]) for rank in range(4)]
    assert f"4 on 2 node(s), which meet at {ADDRESSES[0]}:{PORT}" in printed[0]
    assert "toy DDP step" in printed[0]
    assert " rank " not in printed[1], "rank 0 prints"


@pytest.mark.slow
def test_an_interface_that_does_not_exist_is_named(nodes, tmp_path):
    statuses, printed = check(nodes, tmp_path, "--ddp_timeout=5", GLOO_SOCKET_IFNAME="eth7")
    assert statuses == [1, 1], "\n".join(printed)
    for rank, text in enumerate(printed):
        (line,) = errors(text)
        assert line.startswith(f"error: rank {rank} could not connect to the other ranks: ")
        assert "eth7" in line


@pytest.mark.slow
def test_a_firewall_that_leaves_only_the_port_of_the_rendezvous_is_one_line(nodes, tmp_path):
    """Node 0 drops what it would send from all ports that the system assigns."""
    ip("-n", nodes[0], "rule", "add", "ipproto", "tcp", "sport", "30000-65534", "blackhole")
    statuses, printed = check(nodes, tmp_path, "--ddp_timeout=10")
    assert statuses == [1, 1], "\n".join(printed)
    for rank, text in enumerate(printed):
        (line,) = errors(text)
        assert line.startswith(f"error: rank {rank} could not connect to the other ranks: ")
