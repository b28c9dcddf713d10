"""Forward packets between two TUN devices with the rate and the propagation delay of a slower link.

`app.bench.two_nodes` starts this program, which ends when its standard input is closed:

    python -m app.bench.link_forwarder FILE_DESCRIPTOR FILE_DESCRIPTOR BYTES_PER_SECOND SECONDS

Each direction is a FIFO queue without a limit: a packet leaves the sender when all packets before it have been
transmitted at the rate, and arrives a delay later. No packet is lost.
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

    def __init__(self, source: int, target: int, *, bytes_per_second: float, delay: float) -> None:
        self.source, self.target = source, target
        self.bytes_per_second, self.delay = bytes_per_second, delay
        self.in_flight: deque[tuple[float, bytes]] = deque()  # (time of arrival, packet), in order
        self.idle_at = 0.0  # when the last packet has been transmitted

    def receive(self) -> None:
        """Read the packets that wait in the device, and compute when they arrive."""
        for _ in range(PACKETS_AT_ONCE):
            try:
                packet = os.read(self.source, LARGEST_PACKET)
            except BlockingIOError:
                return
            self.idle_at = max(time.monotonic(), self.idle_at) + len(packet) / self.bytes_per_second
            self.in_flight.append((self.idle_at + self.delay, packet))

    def deliver(self) -> None:
        while self.in_flight and self.in_flight[0][0] <= time.monotonic():
            os.write(self.target, self.in_flight.popleft()[1])

    def seconds_to_next(self) -> float:
        """Return the time until the next packet arrives; infinity: none is in flight."""
        return max(0.0, self.in_flight[0][0] - time.monotonic()) if self.in_flight else math.inf


def forward(first: int, second: int, *, bytes_per_second: float, delay: float) -> None:
    directions = {
        source: Direction(source, target, bytes_per_second=bytes_per_second, delay=delay)
        for source, target in ((first, second), (second, first))
    }
    standard_input = sys.stdin.fileno()
    while True:
        wait = min(direction.seconds_to_next() for direction in directions.values())
        # select() waits for microseconds, epoll() only for milliseconds.
        readable, _, _ = select.select([standard_input, *directions], [], [], None if wait == math.inf else wait)
        if standard_input in readable:
            return
        for source, direction in directions.items():
            if source in readable:
                direction.receive()
            direction.deliver()


def main() -> None:
    with suppress(OSError):  # in some containers root may not do this
        # Otherwise a packet would wait until a training process has used up its time slice.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    first, second, rate, delay = sys.argv[1:]
    forward(int(first), int(second), bytes_per_second=float(rate), delay=float(delay))


if __name__ == "__main__":
    main()
