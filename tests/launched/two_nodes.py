"""Two nodes on one machine: two network namespaces connected only by a virtual cable (a veth pair).

They share the file system, as the nodes of a cluster often do.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from helpers.jobs import PROJECT

from app.bench.two_nodes import ADDRESSES, INTERFACE, SYSTEM_PATH, configure, run_command

SCRIPT = PROJECT / "run_scripts" / "multi_node.sh"


def connect(names: list[str]) -> None:
    """Connect two namespaces by a virtual cable (a veth pair), which needs no process that forwards packets."""
    ip("-n", names[0], "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", names[1])
    configure(names)
    # The kernel reports the link's state up to a second later, and a program may not use an interface that is down.
    wait_until(lambda: all("state UP" in ip("-n", n, "link", "show", "dev", INTERFACE).stdout for n in names), 5)


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(["ip", *arguments])


def processes_on(node: str) -> list[str]:
    """Return the ids of a node's processes."""
    return ip("netns", "pids", node).stdout.split()


def kill_node(node: str) -> None:
    """Kill all processes of a node at once."""
    subprocess.run(["kill", "-KILL", *processes_on(node)], check=True)


def start(nodes: list[str], rank: int, *arguments: str, log: Path, **more: str) -> subprocess.Popen[bytes]:
    """Start multi_node.sh with `arguments` on a node, and write its output to `log`."""
    place = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
    place |= {"NPROC_PER_NODE": "1"} | more
    environment = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"} | place | {"PATH": SYSTEM_PATH}
    on_node = ["ip", "netns", "exec", nodes[rank], "bash", str(SCRIPT), *arguments]
    with log.open("w") as output:
        return subprocess.Popen(on_node, env=environment, cwd=PROJECT, stdout=output, stderr=subprocess.STDOUT)


def wait_until(happened: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition, but shorter than pytest's own limit, so that a failure shows the logs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not happened():
        time.sleep(0.1)


def wait_for_all(jobs: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until all jobs have ended, or for `seconds`."""
    wait_until(lambda: all(job.poll() is not None for job in jobs), seconds)
