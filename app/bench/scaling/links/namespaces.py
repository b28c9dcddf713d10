"""Two network namespaces on this machine, which behave like two nodes of a cluster. They share the file system.

Needs Linux, iproute2 (the command `ip`) and root. Both namespaces, and all processes in them, are removed at the end of
the block, even if this process is killed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ....common.errors import UserError

LINK_SECONDS = 5.0  # the longest wait for a link that has been switched on
INTERFACE = "cable"  # the name, in each namespace, of the interface that leads to the other one
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# `ip` and `tc` are in /usr/sbin, which may not be on a user's PATH.
SYSTEM_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

# Waits for the end of its standard input, which is closed when the block ends and also when this process is killed.
# Every process in these namespaces belongs to the block, including torchrun's workers, which have their own sessions.
KEEPER = """
cat >/dev/null
for namespace in "$@"; do
  ip netns pids "$namespace" | xargs --no-run-if-empty kill -KILL
  ip netns delete "$namespace"
done
"""


class NamespacesUnavailable(UserError):
    """This machine, or this user, cannot create network namespaces. The message says what is missing."""


@contextmanager
def network_namespaces() -> Iterator[list[str]]:
    """Create two network namespaces, which are not connected yet, and yield their names.

    Raises:
        NamespacesUnavailable: not Linux, no iproute2, or not root.
    """
    if shutil.which("ip", path=SYSTEM_PATH) is None:
        raise NamespacesUnavailable("two nodes on one machine need Linux with iproute2 (the command ip)")
    unique = uuid.uuid4().hex[:8]
    names = [f"samebits-{unique}-{node}" for node in range(2)]
    keeper = ["bash", "-c", KEEPER, "keeper", *names]
    # Started first, so that nothing can remain. It is not in this session: Ctrl-C must not end it.
    with subprocess.Popen(
        keeper, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env={"PATH": SYSTEM_PATH}, start_new_session=True
    ):
        with refusals_as_unavailable("network namespaces"):
            for name in names:
                run_command(["ip", "netns", "add", name])
            for name in names:
                run_command(["ip", "-n", name, "link", "set", "lo", "up"])
        yield names


@contextmanager
def refusals_as_unavailable(what: str) -> Iterator[None]:
    """Turn a failed command of the block into `NamespacesUnavailable`, which names what two nodes need."""
    try:
        yield
    except subprocess.CalledProcessError as refusal:
        problem = " ".join(refusal.stderr.split()) or f"{shlex.join(refusal.cmd)}: exit status {refusal.returncode}"
        raise NamespacesUnavailable(f"two nodes on one machine need {what}: {problem}") from None


def connect(names: Sequence[str]) -> None:
    """Connect two namespaces by a virtual cable (a veth pair)."""
    run_command(
        ["ip", "-n", names[0], "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", names[1]]
    )
    configure(names)
    # The kernel reports the link's state up to a second later, and a program may not use an interface that is down.
    deadline = time.monotonic() + LINK_SECONDS
    while not all(_is_up(name) for name in names) and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_up(name: str) -> bool:
    return "state UP" in run_command(["ip", "-n", name, "link", "show", "dev", INTERFACE]).stdout


def configure(names: Sequence[str]) -> None:
    """Give the interface of each namespace its address and switch it on."""
    for name, address in zip(names, ADDRESSES, strict=True):
        run_command(["ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE])
        run_command(["ip", "-n", name, "link", "set", INTERFACE, "up"])


def inside(name: str, command: Sequence[str]) -> list[str]:
    """Return the command that replaces itself with another command, inside a namespace."""
    return [str(shutil.which("ip", path=SYSTEM_PATH)), "netns", "exec", name, *command]


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of the system. Raises CalledProcessError if it fails; `stderr` says why."""
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": SYSTEM_PATH}, check=True)
