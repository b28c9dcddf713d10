"""The link between two nodes that a benchmark emulates."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
        return self.delay_ms / 1000

    def __str__(self) -> str:
        return "unshaped" if self == Link() else f"{self.gbit:g} Gbit/s, {self.delay_ms:g} ms"
