"""Two nodes on one machine, connected by a link of a given rate and delay.

    with two_nodes(Link(gbit=1, delay_ms=5)) as names:
        subprocess.run(inside(names[0], ["ping", ADDRESSES[1]]))

The nodes are network namespaces, which share the file system. They need Linux, iproute2 (the command `ip`) and root.
Both, and all processes in them, are removed at the end of the block, even if this process is killed. Each has a TUN
device, and a process forwards packets between the two (`app.bench.link_forwarder`).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import shutil
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..cli import positive
from ..common.errors import UserError, shorten
from ..common.paths import CLONE, PACKAGE
from .link_forwarder import LARGEST_PACKET

INTERFACE = "cable"  # the name, in each namespace, of the interface that leads to the other one
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# `ip` is in /usr/sbin, which may not be on a user's PATH.
SYSTEM_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
# TCP would otherwise return to slow start in every step whose computation is longer than its retransmission timeout
# (0.2 s and more). BBR, the default of some machines, estimates the rate of the link and reduces it at times.
TCP_SETTINGS = {"tcp_slow_start_after_idle": "0", "tcp_congestion_control": "reno"}
# Waits for the end of its standard input, which is closed when the block ends and also when this process is killed.
# Every process in these namespaces belongs to the block, including torchrun's workers, which have their own sessions.
KEEPER = """
cat >/dev/null
for namespace in "$@"; do
  ip netns pids "$namespace" | xargs --no-run-if-empty kill -KILL
  ip netns delete "$namespace"
done
"""


@dataclass(frozen=True)
class Link:
    """The shape of a link between two nodes."""

    gbit: float  # rate in each direction in Gbit/s
    delay_ms: float  # propagation delay in one direction

    def __str__(self) -> str:
        return f"{self.gbit:g} Gbit/s, {self.delay_ms:g} ms"


def link(text: str) -> Link:
    """Parse RATE:DELAY, as the `type` of a flag."""
    rate, _, delay = text.partition(":")
    try:
        parsed = Link(positive(rate), float(delay))
    except (ValueError, argparse.ArgumentTypeError):
        parsed = None
    if parsed is None or not 0 <= parsed.delay_ms <= 1000:
        raise argparse.ArgumentTypeError(f"{shorten(text)}: must be Gbit/s:milliseconds, such as 1:5")
    return parsed


class NamespacesUnavailable(UserError):
    """This machine, or this user, cannot have two nodes. The message says what is missing."""


@contextmanager
def two_nodes(link: Link) -> Iterator[list[str]]:
    """Create two network namespaces and a link between them, and yield their names.

    Raises:
        NamespacesUnavailable: not Linux, no iproute2, not root, no TUN devices, or a command fails.
    """
    with network_namespaces() as names, ExitStack() as stack:
        with refusals_as_unavailable("a link between them"):
            stack.enter_context(_forwarder(names, link))
            for name in names:
                for setting, value in TCP_SETTINGS.items():
                    run_command(inside(name, ["sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{setting}"]))
        yield names


@contextmanager
def network_namespaces() -> Iterator[list[str]]:
    """Create two network namespaces, which are not connected yet, and yield their names.

    Raises:
        NamespacesUnavailable: not Linux, no iproute2, or not root.
    """
    if shutil.which("ip", path=SYSTEM_PATH) is None:
        raise NamespacesUnavailable("two nodes on one machine need Linux with iproute2 (the command ip)")
    unique = uuid.uuid4().hex[:8]
    names = [f"samebits-{os.getpid()}-{unique}-{node}" for node in range(2)]
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


@contextmanager
def _forwarder(names: Sequence[str], link: Link) -> Iterator[None]:
    """Connect two namespaces by a TUN device in each and a process. The devices vanish when the process ends."""
    with ExitStack() as descriptors:
        devices = []
        for name in names:
            device = f"samebits{uuid.uuid4().hex[:6]}"
            devices.append(_create_tun(device, descriptors))
            run_command(["ip", "link", "set", device, "netns", name])
            # The larger the packets, the less CPU time they take: most of it is per packet.
            rename = ["name", INTERFACE, "mtu", str(LARGEST_PACKET), "txqueuelen", "10000"]
            run_command(["ip", "-n", name, "link", "set", device, *rename])
        configure(names)
        arguments = [*map(str, devices), repr(link.gbit * 1e9 / 8), repr(link.delay_ms / 1000)]
        process = subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE}.bench.link_forwarder", *arguments],
            cwd=CLONE,
            stdin=subprocess.PIPE,
            pass_fds=devices,
            start_new_session=True,  # Ctrl-C must not end it before the jobs that use the link
        )
    with process:  # its end closes the standard input, and waits for the process
        yield


def _create_tun(name: str, descriptors: ExitStack) -> int:
    """Create a TUN device in this network namespace; return its file descriptor, which `descriptors` closes."""
    try:
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        descriptors.callback(os.close, descriptor)
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError as problem:
        raise NamespacesUnavailable(f"two nodes on one machine need TUN devices: /dev/net/tun: {problem}") from None
    return descriptor
