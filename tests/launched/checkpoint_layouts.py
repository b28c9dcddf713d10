"""Save a training state under some layouts, and load it under others, on real process groups of up to 7 ranks.

Usage: FORKED_RANKS=7 python checkpoint_layouts.py FOLDER SAVED_BY->LOADED_BY …, each as `zero3-4`, with 4 ranks.

A state is a reference in which each value is different, so that a row at a wrong place is noticed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.forked_ranks import fork_ranks
from helpers.training_states import Layout, Training, local, new_reference, new_state, part_of
from helpers.worlds import fake_world
from torch.distributed import PrefixStore, TCPStore

from app.distributed.world import create_node_groups

DTYPE = torch.float64  # so that a value that is rounded on the way is noticed
REFERENCE = new_reference(DTYPE)
MOMENTS = ("exp_avg", "exp_avg_sq")


def layout_of(name: str) -> Layout:
    strategy, _, size = name.partition("-")
    return strategy, int(size)


def on_ranks(name: str, layout: Layout, store: TCPStore, work: Callable[[Training], None]) -> None:
    """Do the work on the ranks of a layout; the other ranks wait."""
    rank, size = int(os.environ["RANK"]), layout[1]
    if rank < size:
        dist.init_process_group("gloo", store=PrefixStore(name, store), rank=rank, world_size=size)
        world = fake_world(rank, size)
        world = replace(world, node_groups=create_node_groups(rank, world.topology, world.timeout))
        with torch.no_grad():
            work(new_state(layout, world, seed=rank + 100, dtype=DTYPE))
        dist.barrier()
        dist.destroy_process_group()
    store.set(f"{name}, rank {rank}", "done")
    store.wait([f"{name}, rank {other}" for other in range(int(os.environ["WORLD_SIZE"]))])


def save(training: Training, layout: Layout, folder: Path) -> None:
    rank, parameters = training.world.rank, dict(training.model.named_parameters())
    for name, parameter in parameters.items():
        local(parameter).copy_(part_of(REFERENCE["model"][name], layout, rank))
    training.model.count.fill_(REFERENCE["model"]["count"] + rank)  # every rank has buffers of its own rows
    training.model.mean.copy_(REFERENCE["model"]["mean"] + rank)
    optimizer = training.strategy.local_optimizer(training.optimization.optimizer)
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, steps in REFERENCE["step"].items():
        if id(parameters[name]) in mine:
            moments = {key: torch.zeros_like(parameters[name]) for key in MOMENTS}
            for key, moment in moments.items():
                local(moment).copy_(part_of(REFERENCE[key][name], layout, rank))
            optimizer.state[parameters[name]] = {"step": steps.clone()} | moments
    training.optimization.scheduler.last_epoch = 4
    training.optimization.scheduler._last_lr = [0.25, 0.5]
    training.optimization.loss_scale.value.fill_(2.0**-7)
    written = training.save(folder)
    # No rank holds more than its part, so none may write or gather more.
    size = (folder / written[0]).stat().st_size
    complete = sum(value.nbytes for tensors in REFERENCE.values() for value in tensors.values())
    if layout[0] == "zero3" and layout[1] == 4:
        assert size < 4000 + complete / 2, f"rank {rank} wrote {size} bytes of {complete}"


def load(training: Training, layout: Layout, folder: Path) -> None:
    rank, parameters = training.world.rank, dict(training.model.named_parameters())
    optimizer = training.strategy.local_optimizer(training.optimization.optimizer)
    for parameter in optimizer.param_groups[0]["params"]:  # nothing of what was there before must remain
        optimizer.state[parameter] = {"step": torch.tensor(3.0)}
    training.load(folder)
    for name, parameter in parameters.items():
        assert torch.equal(local(parameter), part_of(REFERENCE["model"][name], layout, rank)), name
    for name in ("count", "mean"):
        assert torch.equal(getattr(training.model, name), REFERENCE["model"][name]), name
    names = {id(parameter): name for name, parameter in parameters.items()}
    held = {names[id(parameter)]: state for parameter, state in optimizer.state.items()}
    for name, state in held.items():
        assert state.keys() == {"step", *MOMENTS}
        assert torch.equal(state["step"], REFERENCE["step"][name]), name
        for key in MOMENTS:
            assert torch.equal(local(state[key]), part_of(REFERENCE[key][name], layout, rank)), (key, name)
    by_rank: list[list[str]] = [[] for _ in range(layout[1])]
    dist.all_gather_object(by_rank, list(held))
    copies = 1 if layout[0] == "zero1" else layout[1]
    assert sorted(name for held in by_rank for name in held) == sorted([*REFERENCE["step"]] * copies)
    assert [group["lr"] for group in training.optimization.optimizer.param_groups] == [0.25, 0.5]
    assert training.optimization.scheduler.last_epoch == 4
    assert training.optimization.loss_scale.value == 2.0**-7


def main() -> None:
    folder, pairs = Path(sys.argv[1]), [pair.split("->") for pair in sys.argv[2:]]
    fork_ranks()
    torch.set_num_threads(1)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=120))
    for name in dict.fromkeys(saved_by for saved_by, _ in pairs):
        (folder / name).mkdir(exist_ok=True)
        on_ranks(f"save {name}", layout_of(name), store, lambda mine, n=name: save(mine, layout_of(n), folder / n))
    for saved_by, loaded_by in pairs:
        if os.environ["RANK"] == "0":
            print(f"{saved_by} -> {loaded_by}", flush=True)  # the last one is that which failed
        layout = layout_of(loaded_by)
        on_ranks(
            f"{saved_by} -> {loaded_by}", layout, store, lambda mine, n=saved_by, to=layout: load(mine, to, folder / n)
        )


if __name__ == "__main__":
    main()
