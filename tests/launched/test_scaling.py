"""The shaped link between two network namespaces, and app.bench.scaling, shortened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from helpers.jobs import Job, unavailable

from app.bench.two_nodes import ADDRESSES, Link, NamespacesUnavailable, inside, run_command, two_nodes

pytestmark = [pytest.mark.launched, pytest.mark.slow]

# Measures the round-trip time of a byte, and the rate of a stream, over TCP.
SERVER = """
import socket, sys
listener = socket.create_server(("", 5555))
print("ready", flush=True)
peer, _ = listener.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(20):
    peer.send(peer.recv(1))
left = int(sys.argv[1])
while left:
    left -= len(peer.recv(min(left, 1 << 20)))
peer.send(b"x")
"""
CLIENT = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5555))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips = []
for _ in range(20):
    began = time.perf_counter()
    peer.send(b"x")
    peer.recv(1)
    trips.append(time.perf_counter() - began)
began = time.perf_counter()
peer.sendall(bytes(int(sys.argv[2])))
peer.recv(1)
print(min(trips), time.perf_counter() - began)
"""


def namespaces_of(job: Job) -> list[str]:
    """Return the network namespaces that a job has created. Other tests may create and remove theirs meanwhile."""
    names = [line.split()[0] for line in run_command(["ip", "netns", "list"]).stdout.splitlines()]
    return [name for name in names if name.startswith(f"samebits-{job.torchrun.pid}-")]


@pytest.mark.parametrize("shape", [Link(1, 5), Link(1, 0.1), Link(0.2, 20)], ids=str)
def test_a_link_has_the_rate_and_the_delay_that_were_asked_for(shape: Link) -> None:
    """It can't be faster than asked; on a busy machine it may be slower for a moment."""
    size, delay = int(0.4 * shape.gbit * 1e9 / 8), shape.delay_ms / 1000  # 0.4 s
    with ExitStack() as stack:
        try:
            names = stack.enter_context(two_nodes(shape))
        except NamespacesUnavailable as refusal:
            unavailable(str(refusal))
        command = inside(names[0], [sys.executable, "-c", SERVER, str(size)])
        server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert server.stdout is not None
        server.stdout.readline()
        client = inside(names[1], [sys.executable, "-c", CLIENT, ADDRESSES[0], str(size)])
        printed = subprocess.run(client, capture_output=True, text=True, timeout=60, check=True).stdout
    round_trip, seconds = map(float, printed.split())
    assert 2 * delay <= round_trip < 2 * delay + 0.005
    assert 0.4 + 2 * delay <= seconds < 1.2


def test_the_benchmark_measures_and_leaves_nothing(tmp_path: Path) -> None:
    flags = ["--ranks", 2, "--links", "1:1", "--rounds", 1, "--steps", 2, "--max_length", 16, "--use_cpu"]
    flags += ["--train_batch_size", 4, "--strategies", "zero3", "--output_dir", tmp_path / "out"]
    with Job("app.bench.scaling", *flags, cwd=tmp_path, ranks=0) as job:
        done = job.finish()
    assert done.status == 0, done.err
    assert not namespaces_of(job)
    seconds = json.loads((tmp_path / "out" / "scaling.json").read_text())["sections"]["measured"]["seconds"]
    two_ranks = {"ddp, 2 rank(s)", "zero3, 2 rank(s)"}
    if "not measured: two nodes" not in done.out:
        over_link = "ddp, 2 rank(s), 1 Gbit/s, 1 ms"
        two_ranks.add(over_link)
        # The gradients of 5 million parameters: the link's time alone is a lower bound of the step's.
        assert min(seconds[over_link]) > 0.1
    assert set(seconds) == two_ranks
    assert all(value > 0 for times in seconds.values() for value in times)


def test_an_interrupted_benchmark_leaves_nothing(tmp_path: Path) -> None:
    flags = ["--ranks", 2, "--links", "1:1", "--rounds", 100, "--output_dir", tmp_path / "out"]
    with Job("app.bench.scaling", *flags, cwd=tmp_path, ranks=0) as job:
        job.wait_for((tmp_path / "out").exists)  # the first run has ended, and another one is being started
        os.kill(job.torchrun.pid, signal.SIGINT)
        done = job.finish()
        assert done.status == 130, done.err
        assert "every job that was started has ended" in done.err
    assert not namespaces_of(job)
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(one.info["cmdline"] or [])]
