"""Simulate gloo's ring all-reduce between two ranks, over a link with a rate and a propagation delay.

See docs/scaling.md#the-model; the protocol is that of gloo/allreduce.cc and gloo/transport/tcp/pair.cc. Announcements
and segments use one TCP connection, where each waits for what was sent before. The thread that reads the connection
sends a segment as soon as it is announced, while announcements are made by the thread that waits for a segment, which
has to wake up first. So if both have something to send, the announcement waits for the segment.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence

from ...common.link import Link

LARGEST_SEGMENT = 2**20  # bytes; gloo/allreduce.h: kMaxSegmentSize
SEGMENTS_AT_ONCE = 2
COLLECTIVES_AT_ONCE = 2  # the number of threads of ProcessGroupGloo
WAKE_UP = 20e-6  # seconds until a waiting thread continues; it decides what is sent first, and hardly adds to the sum


def simulate_ring(ready: Sequence[float], sizes: Sequence[int], link: Link, *, software: float) -> list[float]:
    """Return when the all-reduces of several buckets have finished, from when each is ready, in seconds.

    Args:
        software: seconds per byte that TCP and gloo take. Half of it, the sender's, passes while a segment is being
            transmitted; the other half, the receiver's, after it has arrived.
    """
    return _Simulation(sizes, link, software).run(ready)


def segments_per_phase(size: int) -> int:
    """Return how many segments a rank sends in the reduce-scatter, and again in the all-gather."""
    return max(math.ceil(size / LARGEST_SEGMENT / 2), SEGMENTS_AT_ONCE)


class _Simulation:
    """A discrete event simulation: each event is a function that is called at its time.

    Both ranks do the same at the same time, so one direction of the link is enough.
    """

    def __init__(self, sizes: Sequence[int], link: Link, software: float) -> None:
        self.link, self.software = link, software
        self.segments = [segments_per_phase(size) for size in sizes]
        self.segment_bytes = [size / (2 * n) for size, n in zip(sizes, self.segments, strict=True)]
        self.ends = [math.inf] * len(sizes)
        self.posted, self.received = [0] * len(sizes), [0] * len(sizes)  # segments of each bucket, in both phases
        self.free_threads, self.waiting = COLLECTIVES_AT_ONCE, deque[int]()
        self.now = self.link_free_at = self.software_free_at = 0.0
        self.events: list[tuple[float, int, Callable[[int], None], int]] = []
        self.n_events = 0

    def run(self, ready: Sequence[float]) -> list[float]:
        for bucket, at in enumerate(ready):
            self._schedule(at, self._enqueue, bucket)
        while self.events:
            self.now, _, event, bucket = heapq.heappop(self.events)
            event(bucket)
        return self.ends

    def _schedule(self, at: float, event: Callable[[int], None], bucket: int) -> None:
        self.n_events += 1  # events of the same time keep their order
        heapq.heappush(self.events, (at, self.n_events, event, bucket))

    def _enqueue(self, bucket: int) -> None:
        self.waiting.append(bucket)
        self._start_collectives()

    def _start_collectives(self) -> None:
        while self.free_threads and self.waiting:
            self.free_threads -= 1
            self._start_phase(self.waiting.popleft())

    def _start_phase(self, bucket: int) -> None:
        self.posted[bucket] += SEGMENTS_AT_ONCE
        for _ in range(SEGMENTS_AT_ONCE):
            self._announce(bucket)

    def _announce(self, bucket: int) -> None:
        """Announce that a segment can be received. This is a short message, but it waits for what is being sent."""
        arrives = max(self.now, self.link_free_at) + self.link.delay
        self._schedule(max(arrives, self.software_free_at), self._send, bucket)

    def _send(self, bucket: int) -> None:
        """Send a segment, because the other rank's announcement has arrived."""
        size, software = self.segment_bytes[bucket], self.segment_bytes[bucket] * self.software
        starts = max(self.now, self.link_free_at)
        self.link_free_at = starts + size / self.link.bytes_per_second
        first_byte, last_byte = starts + self.link.delay, self.link_free_at + self.link.delay
        sent = max(first_byte, self.software_free_at) + software / 2
        self.software_free_at = max(sent, last_byte) + software / 2
        self._schedule(self.software_free_at, self._receive, bucket)

    def _receive(self, bucket: int) -> None:
        """Continue after a segment has been received, and added to this rank's own in the first phase."""
        self.received[bucket] += 1
        per_phase = self.segments[bucket]
        if self.posted[bucket] % per_phase:
            self.posted[bucket] += 1
            self._schedule(self.now + WAKE_UP, self._announce, bucket)
        elif self.received[bucket] == 2 * per_phase:
            self.ends[bucket] = self.now
            self.free_threads += 1
            self._start_collectives()
        elif self.received[bucket] == per_phase:
            self._start_phase(bucket)
