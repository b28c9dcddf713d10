"""Compare how the ranks of a job round, with one another and with the job that wrote a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..common.machine import UNSET, arithmetic
from .collectives import all_gather_object
from .world import World

Arithmetic = Mapping[str, Sequence[str]]  # the distinct values of each fact over all ranks, sorted


def gather_arithmetic(world: World) -> dict[str, list[str]]:
    """Return the distinct values of each fact of `arithmetic` over all ranks. Collective."""
    by_rank = all_gather_object(arithmetic(world.device), world)
    names = {name: None for facts in by_rank for name in facts}  # a set would not keep the order
    return {name: sorted({facts.get(name, UNSET) for facts in by_rank}) for name in names}


def describe_mixed(facts: Arithmetic) -> str | None:
    """Name the facts in which the ranks of a job differ; None if they agree."""
    mixed = [f"{name} ({', '.join(values)})" for name, values in facts.items() if len(values) > 1]
    if not mixed:
        return None
    return f"the ranks differ in {', '.join(mixed)}: results depend on which rank computes which rows"


def changes_of_arithmetic(before: Arithmetic, now: Arithmetic) -> list[tuple[str, str, str]]:
    """Return (name, value before, value now) of each fact that both jobs recorded."""
    # An unset variable is recorded as such. A fact is missing only if it was not recorded at all: the version that
    # wrote the checkpoint did not know it, or another kind of device does not have it. The device itself is a fact.
    return [(name, ", ".join(before[name]), ", ".join(values)) for name, values in now.items() if name in before]
