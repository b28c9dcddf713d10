"""Two nodes on one machine, connected by a link of a given rate and delay.

    with two_nodes(Link(gbit=1, delay_ms=5)) as names:
        subprocess.run(inside(names[0], ["ping", ADDRESSES[1]]))

The nodes are network namespaces, which share the file system. They need Linux, iproute2 (the command `ip`) and root.
Both, and all processes in them, are removed at the end of the block, even if this process is killed. Each has a TUN
device, and a thread of this process forwards packets between the two with the rate and the delay of the link.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import os
import select
import shlex
import shutil
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..cli import positive
from ..common.errors import UserError, shorten

INTERFACE = "cable"  # the name, in each namespace, of the interface that leads to the other one
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# `ip` is in /usr/sbin, which may not be on a user's PATH.
SYSTEM_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
LARGEST_PACKET = 65_535  # the larger the packets, the less CPU time they take: most of it is per packet
PACKETS_AT_ONCE = 16  # that are read from one device before the other direction is served
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


class NamespacesUnavailable(UserError):
    """This machine, or this user, cannot have two nodes. The message says what is missing."""


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


@contextmanager
def two_nodes(link: Link) -> Iterator[list[str]]:
    """Create two network namespaces and a link between them, and yield their names.

    Raises:
        NamespacesUnavailable: not Linux, no iproute2, not root, no TUN devices, or a command fails.
    """
    with network_namespaces() as names, ExitStack() as stack:
        with refusals_as_unavailable("a link between them"):
            devices = []
            for name in names:
                device = f"samebits{uuid.uuid4().hex[:6]}"
                devices.append(_create_tun(device, stack))
                run_command(["ip", "link", "set", device, "netns", name])
                rename = ["name", INTERFACE, "mtu", str(LARGEST_PACKET), "txqueuelen", "10000"]
                run_command(["ip", "-n", name, "link", "set", device, *rename])
            configure(names)
            for name in names:
                for setting, value in TCP_SETTINGS.items():
                    run_command(inside(name, ["sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{setting}"]))
        stack.enter_context(_forwarding(devices, link))
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


def _create_tun(name: str, stack: ExitStack) -> int:
    """Create a TUN device in this network namespace; return its file descriptor, which `stack` closes."""
    try:
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        stack.callback(os.close, descriptor)
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError as problem:
        raise NamespacesUnavailable(f"two nodes on one machine need TUN devices: /dev/net/tun: {problem}") from None
    return descriptor


# ---- the link --------------------------------------------------------------------------------------------------------


@dataclass
class Direction:
    """One direction of the link: a FIFO queue without a limit, from one TUN device's file descriptor to another's.

    A packet leaves the sender when all packets before it have been transmitted at the rate, and arrives a delay later.
    No packet is lost.
    """

    source: int
    target: int
    link: Link
    in_flight: deque[tuple[float, bytes]] = field(default_factory=deque)  # (time of arrival, packet), in order
    idle_at: float = 0.0  # when the last packet has been transmitted

    def receive(self) -> None:
        """Read the packets that wait in the device, and compute when they arrive."""
        with suppress(BlockingIOError):
            for _ in range(PACKETS_AT_ONCE):
                packet = os.read(self.source, LARGEST_PACKET)
                self.idle_at = max(time.monotonic(), self.idle_at) + 8e-9 * len(packet) / self.link.gbit
                self.in_flight.append((self.idle_at + self.link.delay_ms / 1000, packet))

    def deliver(self) -> None:
        while self.in_flight and self.in_flight[0][0] <= time.monotonic():
            os.write(self.target, self.in_flight.popleft()[1])

    def seconds_to_next(self) -> float:
        """Return the time until the next packet arrives; infinity: none is in flight."""
        return max(0.0, self.in_flight[0][0] - time.monotonic()) if self.in_flight else math.inf


@contextmanager
def _forwarding(devices: Sequence[int], link: Link) -> Iterator[None]:
    """Forward packets between two TUN devices until the end of the block, in a thread."""
    first, second = devices
    end, closed_at_end = os.pipe()
    thread = threading.Thread(
        target=_forward, args=(Direction(first, second, link), Direction(second, first, link), end)
    )
    thread.start()
    try:
        yield
    finally:
        os.close(closed_at_end)
        thread.join()
        os.close(end)


def _forward(there: Direction, back: Direction, end: int) -> None:
    with suppress(OSError):  # in some containers root may not do this
        # This thread alone. Otherwise a packet would wait until a training process has used up its time slice.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    while True:
        wait = min(there.seconds_to_next(), back.seconds_to_next())
        # select() waits for microseconds, epoll() only for milliseconds.
        readable, _, _ = select.select([end, there.source, back.source], [], [], None if wait == math.inf else wait)
        if end in readable:
            return
        for direction in (there, back):
            if direction.source in readable:
                direction.receive()
            direction.deliver()
