"""Start torchrun on two nodes of this machine, with a link between them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ...common.link import Link
from ...distributed.launcher import TorchrunJob, torchrun_command
from .nodes import ADDRESSES, INTERFACE, inside, shaped_link

PORT = 29500  # free, because a namespace has ports of its own
# Set for the ranks of `run_on_link`: how the link is emulated.
LINK_METHOD_VARIABLE = "SAMEBITS_LINK_METHOD"
END_SECONDS = 60.0  # that the second node has to end after the first


def commands_on_nodes(
    module: str, flags: Sequence[Any], namespaces: Sequence[str], *, nproc_per_node: int
) -> tuple[list[list[str]], dict[str, str]]:
    """Return the commands that start a job on nodes, one for each namespace, and the variables that they need."""
    place = [f"--nnodes={len(namespaces)}", f"--master_addr={ADDRESSES[0]}", f"--master_port={PORT}"]
    commands = []
    for node, name in enumerate(namespaces):
        torchrun_flags = [*place, f"--node_rank={node}"]
        command = torchrun_command(module, flags, nproc_per_node=nproc_per_node, torchrun_flags=torchrun_flags)
        commands.append(inside(name, command))
    return commands, {"GLOO_SOCKET_IFNAME": INTERFACE}


def run_on_link(module: str, flags: Sequence[Any], link: Link) -> int:
    """Run a module with one rank on each of two nodes, connected by a link, and return its exit status.

    Raises:
        NamespacesUnavailable: this machine, or this user, cannot have two nodes.
    """
    with shaped_link() as shaped, ExitStack() as stack:
        shaped.shape(link)
        commands, variables = commands_on_nodes(module, flags, shaped.names, nproc_per_node=1)
        variables[LINK_METHOD_VARIABLE] = shaped.method
        jobs = [stack.enter_context(TorchrunJob(command, environment=variables)) for command in commands]
        statuses = [jobs[0].wait(), jobs[1].wait(END_SECONDS)]
    return next(filter(None, statuses), 0)
