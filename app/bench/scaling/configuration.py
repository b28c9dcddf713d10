"""What is measured and predicted: ranks, rows, strategies and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...common.cores import usable_cores
from ...common.link import Link

MODES = ("strong", "weak")
FIT_RANKS = 2  # the fit sees no more than two ranks
NOT_SHARED = 1 << 30


class Hop(NamedTuple):
    """A message between two ranks: its latency in seconds, and the seconds per byte."""

    alpha: float
    beta: float


# Assumed where the flags say nothing: 100-Gigabit Ethernet or InfiniBand, and PCIe 4.0 with 16 lanes.
LINK = Hop(10e-6, 8 / 100e9)
NODE = Hop(5e-6, 8 / 256e9)


@dataclass(frozen=True)
class Configuration:
    """Ranks that train together: on this machine, or one on each of two nodes if there is a link."""

    mode: str  # of MODES: rows of a step that are divided among the ranks, or a number of rows for each rank
    ranks: int
    rows: int  # of each rank in a step
    link: Link | None = None
    strategy: str = "ddp"

    def __str__(self) -> str:
        strategy = "" if self.strategy == "ddp" else f"{self.strategy}, "
        place = "one node" if self.link is None else str(self.link)
        return f"{strategy}{self.mode}, {self.ranks} rank(s), {place}"


class Alone(NamedTuple):
    """Two ranks that compute steps at the same time and exchange nothing."""

    rows: int  # of each rank in a step
    strategy: str = "ddp"

    def __str__(self) -> str:
        strategy = "" if self.strategy == "ddp" else f"{self.strategy}, "
        return f"{strategy}computation of {self.rows} rows, {FIT_RANKS} ranks"


@dataclass(frozen=True)
class ScalingPlan:
    """The measurements to make."""

    model: str  # a key of `flags.SIZES`, or a name or folder as in training
    ranks: Sequence[int]
    links: Sequence[Link]
    batch: int  # rows of a step in strong scaling
    rows: int  # of each rank in weak scaling
    length: int  # tokens of a row
    steps: int  # of a configuration in each round
    rounds: int
    threads: int
    strategies: Sequence[str] = ("ddp",)  # the first one is `ddp`
    gpus: int = 0  # of this machine, of which each rank has its own; 0: the ranks share the CPU cores

    @property
    def n_cores(self) -> int:
        """The number of cores that the ranks share. With a GPU for each, more than they could use."""
        return NOT_SHARED if self.gpus else len(usable_cores())

    def configurations(self, links: bool) -> list[Configuration]:
        """Return all configurations, with or without two nodes."""
        places: list[tuple[str, int, Link | None]] = [("ddp", ranks, None) for ranks in self.ranks]
        if links:
            places += [("ddp", 2, link) for link in self.links]
        places += [(strategy, ranks, None) for strategy in self.strategies[1:] for ranks in self.ranks]
        return [
            Configuration(mode, ranks, self.batch // ranks if mode == "strong" else self.rows, link, strategy)
            for strategy, ranks, link in places
            for mode in MODES
        ]
