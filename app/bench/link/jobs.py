"""Start torchrun on two nodes of this machine, with a link between them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ...common.link import Link
from ...common.paths import PACKAGE
from ...distributed.launcher import TorchrunJob, torchrun_command
from .nodes import ADDRESSES, INTERFACE, inside, shaped_link

PORT = 29500  # free, because a namespace has ports of its own
VARIABLES = {"GLOO_SOCKET_IFNAME": INTERFACE}
# Set for the ranks of `run_on_link`: how the link is emulated.
LINK_METHOD_VARIABLE = "SAMEBITS_LINK_METHOD"
END_SECONDS = 60.0  # that the second node has to end after the first


def place_of(node: int, nodes: int) -> list[str]:
    """Return torchrun's flags for one node of a job."""
    return [f"--nnodes={nodes}", f"--master_addr={ADDRESSES[0]}", f"--master_port={PORT}", f"--node_rank={node}"]


def commands_on_nodes(
    module: str, flags: Sequence[Any], namespaces: Sequence[str], *, nproc_per_node: int
) -> tuple[list[list[str]], dict[str, str]]:
    """Return the commands that start a job on nodes, one for each namespace, and the variables that they need."""
    commands = []
    for node, name in enumerate(namespaces):
        torchrun_flags = place_of(node, len(namespaces))
        command = torchrun_command(module, flags, nproc_per_node=nproc_per_node, torchrun_flags=torchrun_flags)
        commands.append(inside(name, command))
    return commands, VARIABLES


def run_on_link(program: str, flags: Sequence[str], link: Link) -> int:
    """Run a program of `samebits` with one rank on each of two nodes, connected by a link, and return its exit status.

    Raises:
        NamespacesUnavailable: this machine, or this user, cannot have two nodes.
    """
    with shaped_link() as shaped, ExitStack() as stack:
        shaped.shape(link)
        variables = {**VARIABLES, LINK_METHOD_VARIABLE: shaped.method}
        # Not torchrun, which adds 30 lines to a mistake and replaces the status.
        start = [sys.executable, "-m", PACKAGE, program, "--nproc_per_node=1"]
        commands = [
            inside(name, [*start, *place_of(node, len(shaped.names)), *flags]) for node, name in enumerate(shaped.names)
        ]
        jobs = [stack.enter_context(TorchrunJob(command, environment=variables)) for command in commands]
        statuses = [jobs[0].wait(), jobs[1].wait(END_SECONDS)]
    return next(filter(None, statuses), 0)
