"""Forward packets between two TUN devices with the rate and the propagation delay of a slower link.

`app.bench.link.nodes` starts this program where the kernel has no `netem`:

    python -m app.bench.link.link_forwarder FILE_DESCRIPTOR FILE_DESCRIPTOR

Each line on standard input, `BYTES_PER_SECOND SECONDS`, sets the rate and the delay. The program ends when standard
input is closed. Each direction is a FIFO queue without a limit: a packet leaves the sender when all packets before it
have been transmitted at the rate, and arrives a delay later. No packet is lost.
"""

from __future__ import annotations

import math
import os
import select
import sys
import time
from collections import deque
from contextlib import suppress

LARGEST_PACKET = 65_535
PACKETS_AT_ONCE = 16  # that are read from one device before the other direction is served


class Direction:
    """One direction of the link, from one TUN device's file descriptor to another's."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self.in_flight: deque[tuple[float, bytes]] = deque()  # (time of arrival, packet), in order
        self.idle_at = 0.0  # when the last packet has been transmitted

    def receive(self, bytes_per_second: float, delay: float) -> None:
        """Read the packets that wait in the device, and compute when they arrive."""
        for _ in range(PACKETS_AT_ONCE):
            try:
                packet = os.read(self.source, LARGEST_PACKET)
            except BlockingIOError:
                return
            self.idle_at = max(time.monotonic(), self.idle_at) + len(packet) / bytes_per_second
            self.in_flight.append((self.idle_at + delay, packet))

    def deliver(self) -> None:
        while self.in_flight and self.in_flight[0][0] <= time.monotonic():
            os.write(self.target, self.in_flight.popleft()[1])

    def seconds_to_next(self) -> float:
        """Return the time until the next packet arrives; infinity: none is in flight."""
        return max(0.0, self.in_flight[0][0] - time.monotonic()) if self.in_flight else math.inf


def forward(first: int, second: int) -> None:
    directions = {first: Direction(first, second), second: Direction(second, first)}
    bytes_per_second, delay = math.inf, 0.0
    control = sys.stdin.fileno()
    while True:
        wait = min(direction.seconds_to_next() for direction in directions.values())
        # select() waits for microseconds, epoll() only for milliseconds.
        readable, _, _ = select.select([control, *directions], [], [], None if wait == math.inf else wait)
        if control in readable:
            line = os.read(control, 4096)
            if not line:
                return
            bytes_per_second, delay = map(float, line.splitlines()[-1].split())
        for source, direction in directions.items():
            if source in readable:
                direction.receive(bytes_per_second, delay)
            direction.deliver()


def main() -> None:
    with suppress(OSError):  # in some containers root may not do this
        # Otherwise a packet would wait until a training process has used up its time slice.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    forward(int(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()
