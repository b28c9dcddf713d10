"""Several nodes without several machines: torchrun's variables, changed before a program reads them."""

from __future__ import annotations

import os


def divide_among_nodes() -> None:
    """Let the ranks of a torchrun job be on several nodes, RANKS_PER_NODE on each, if that variable is set."""
    inside = int(os.environ.get("RANKS_PER_NODE", "0"))
    if not inside:
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    nodes, rest = divmod(size, inside)
    assert rest == 0, f"{size} ranks, {inside} per node"
    variables = {"LOCAL_WORLD_SIZE": inside, "LOCAL_RANK": rank % inside}
    variables |= {"GROUP_WORLD_SIZE": nodes, "GROUP_RANK": rank // inside}
    os.environ |= {name: str(number) for name, number in variables.items()}
