"""Two nodes on one machine, connected by a link whose rate and delay can be set while jobs use it.

    with shaped_link() as link:
        link.shape(Link(gbit=1, delay_ms=5))
        subprocess.run(inside(link.names[0], ["ping", ADDRESSES[1]]))

Where the kernel has it, `tc netem` shapes a veth pair. Otherwise each node has a TUN device, and a process forwards the
packets between the two (`app.bench.scaling.links.link_forwarder`).
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import psutil

from ....common.paths import CLONE, PACKAGE
from .link_forwarder import LARGEST_PACKET
from .namespaces import (
    INTERFACE,
    NamespacesUnavailable,
    configure,
    connect,
    inside,
    network_namespaces,
    refusals_as_unavailable,
    run_command,
)

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
NETEM_PACKETS = 1_000_000  # netem drops packets beyond its limit; by default 1,000, less than a fast, long link holds
# TCP would otherwise return to slow start in every step whose computation is longer than its retransmission timeout
# (0.2 s and more). BBR, the default of some machines, estimates the rate of the link and reduces it at times.
TCP_SETTINGS = {"tcp_slow_start_after_idle": "0", "tcp_congestion_control": "reno"}


@dataclass(frozen=True)
class Link:
    """The shape of a link between two nodes, by default as fast as this machine forwards packets."""

    gbit: float = math.inf  # rate in each direction in Gbit/s
    delay_ms: float = 0.0  # propagation delay in one direction

    @property
    def bytes_per_second(self) -> float:
        return self.gbit * 1e9 / 8

    @property
    def delay(self) -> float:
        """In seconds."""
        return self.delay_ms / 1000

    def __str__(self) -> str:
        return "unshaped" if self == Link() else f"{self.gbit:g} Gbit/s, {self.delay_ms:g} ms"


@dataclass(frozen=True)
class ShapedLink:
    """Two network namespaces and the link between them."""

    names: Sequence[str]  # of the namespaces
    forwarder: subprocess.Popen[bytes] | None = None  # of packets; None: `tc netem` shapes a veth pair

    @property
    def method(self) -> str:
        """How the link is shaped."""
        return "packets forwarded by a process (this kernel has no netem)" if self.forwarder else "tc netem"

    def shape(self, link: Link) -> None:
        """Set the rate and the delay. Packets that are in flight keep theirs."""
        if self.forwarder is None:
            for name in self.names:  # each shapes what it sends
                run_command(["tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "root", *netem_options(link)])
        else:
            assert self.forwarder.stdin is not None
            self.forwarder.stdin.write(f"{link.bytes_per_second!r} {link.delay!r}\n".encode())
            self.forwarder.stdin.flush()

    def cpu_seconds(self) -> float:
        """Return the CPU time of the forwarder so far. That of netem belongs to the processes that send packets."""
        if self.forwarder is None:
            return 0.0
        times = psutil.Process(self.forwarder.pid).cpu_times()
        return float(times.user + times.system)


@contextmanager
def shaped_link() -> Iterator[ShapedLink]:
    """Create two network namespaces and an unshaped link between them, and remove them at the end of the block.

    Raises:
        NamespacesUnavailable: not Linux, not root, the kernel has neither netem nor TUN devices, or a command fails.
    """
    with network_namespaces() as names, ExitStack() as stack:
        with refusals_as_unavailable("a link between them"):
            link = ShapedLink(names)
            try:
                connect(names)
                link.shape(Link())
            except (OSError, subprocess.CalledProcessError):
                with suppress(subprocess.CalledProcessError):  # there is none, if it could not be created
                    run_command(["ip", "-n", names[0], "link", "delete", INTERFACE])
                link = ShapedLink(names, stack.enter_context(_forwarder(names)))
            for name in names:
                for setting, value in TCP_SETTINGS.items():
                    run_command(inside(name, ["sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{setting}"]))
        yield link


def netem_options(link: Link) -> list[str]:
    """Return netem's arguments for the outgoing packets of one end of a link."""
    rate = [] if link.gbit == math.inf else ["rate", f"{link.gbit * 1e9:.0f}bit"]
    return ["netem", "limit", str(NETEM_PACKETS), "delay", f"{link.delay_ms * 1000:.0f}us", *rate]


@contextmanager
def _forwarder(names: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
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
        process = subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE}.bench.scaling.links.link_forwarder", *map(str, devices)],
            cwd=CLONE,
            stdin=subprocess.PIPE,
            pass_fds=devices,
            start_new_session=True,  # Ctrl-C must not end it before the jobs that use the link
        )
    with process:  # its end closes the standard input, and waits for the process
        yield process


def _create_tun(name: str, descriptors: ExitStack) -> int:
    """Create a TUN device in this network namespace; return its file descriptor, which `descriptors` closes.

    Raises:
        NamespacesUnavailable: the kernel or the container does not offer TUN devices.
    """
    try:
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        descriptors.callback(os.close, descriptor)
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError as problem:
        raise NamespacesUnavailable(f"a shaped link needs tc netem or TUN devices: /dev/net/tun: {problem}") from None
    return descriptor
