"""The cells of app.experiments.same_bits: what is trained, and the table of their hashes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ..common.formats import markdown_table
from ..runs.hashes import DIGITS
from ..settings import Settings

# What --vary can name: the setting, and its values. Those of logical_ranks are the numbers of ranks.
VARIED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "accumulation": ("gradient_accumulation_steps", (1, 2, 4)),
    "sampling": ("train_sampling_strategy", ("random", "group_by_length")),
    "precision": ("precision", ("fp32", "bf16")),
    "logical_ranks": ("logical_ranks", ()),
}


@dataclass(frozen=True)
class Cell:
    """One way to train the same model.

    Attributes:
        training: names of `VARIED` and their values. The cells with the same values must have one hash.
        resumed: the number of ranks and the strategy after the interruption; None without one.
    """

    path_name: str
    ranks: int
    strategy: str
    resumed: tuple[int, str] | None = None
    training: tuple[tuple[str, Any], ...] = ()

    @property
    def values(self) -> list[str]:
        """The values of the settings that are varied."""
        return [str(value) for _, value in self.training]

    @property
    def columns(self) -> list[str]:
        """The cell's columns of the table, without the hash."""
        resumed = f"killed, resumed with {self.resumed[0]} x {self.resumed[1]}" if self.resumed else "none"
        return [*self.values, self.path_name, str(self.ranks), self.strategy, resumed]

    @property
    def folder_name(self) -> str:
        """The name of the run's folder."""
        killed = ["killed"] if self.resumed else []
        return "-".join([self.path_name, str(self.ranks), self.strategy, *self.values, *killed])

    def settings(self, settings: Settings) -> Settings:
        """Return the settings of all cells with those of this cell's training."""
        return replace(settings, **{VARIED[name][0]: value for name, value in self.training})


def build_cells(options: Any, rng: random.Random) -> list[Cell]:
    """Return all cells. Each killed run is resumed with another number of ranks and strategy, if there are others."""
    cells = []
    for values in product(*(VARIED[name][1] or options.ranks for name in options.vary)):
        training = dict(zip(options.vary, values, strict=True))
        numbers = [training["logical_ranks"]] if "logical_ranks" in training else options.ranks
        places = list(product(numbers, options.strategies))
        for path_name, (ranks, strategy), interruption in product(options.paths, places, options.interruptions):
            others = [place for place in places if place != (ranks, strategy)] or places
            elsewhere = [place for place in others if place[0] != ranks and place[1] != strategy] or others
            resumed = rng.choice(elsewhere) if interruption == "killed" else None
            cells.append(Cell(path_name, ranks, strategy, resumed, tuple(training.items())))
    return cells


def trainings(hashes: Mapping[Cell, str]) -> list[dict[Cell, str]]:
    """Divide the cells into those that must have one hash."""
    groups: dict[Any, dict[Cell, str]] = {}
    for cell, hash_ in hashes.items():
        groups.setdefault(cell.training, {})[cell] = hash_
    return list(groups.values())


def as_markdown(hashes: Mapping[Cell, str]) -> str:
    """Return the table, and for each training whether all of its hashes are equal."""
    varied = [name for name, _ in next(iter(hashes)).training]
    header = [*varied, "path", "ranks", "strategy", "interruption", "hash"]
    rows = [[*cell.columns, hash_[:DIGITS]] for cell, hash_ in hashes.items()]
    conclusions = "\n".join(conclude(cells) for cells in trainings(hashes))
    return f"{markdown_table(header, rows, text_columns=len(header))}\n{conclusions}\n"


def conclude(hashes: Mapping[Cell, str]) -> str:
    """Say whether the cells of one training have one hash."""
    training = ", ".join(f"{name} {value}" for name, value in next(iter(hashes)).training)
    different = len(set(hashes.values()))
    if len(hashes) == 1:
        conclusion = "1 cell: nothing to compare it with"
    elif different == 1:
        conclusion = f"all {len(hashes)} cells have one hash: bitwise identical"
    else:
        conclusion = f"{different} different hashes in {len(hashes)} cells: not bitwise identical"
    return f"{training}: {conclusion}" if training else conclusion
