"""Count the collectives of many training steps in one job, and write to RESULT which were not predicted."""

from __future__ import annotations

import gc
import json
import os
from itertools import product
from pathlib import Path

from helpers.forked_ranks import fork_ranks
from helpers.nodes import divide_among_nodes
from helpers.traffic import Step

from app.distributed.collectives import all_gather_object
from app.distributed.process_group import join
from app.program import Program
from app.settings import SHARDED, STRATEGIES, Settings


def main(settings: Settings) -> None:
    with join(settings) as world:
        shapes = [(None, 1), (None, 2), (2 * world.size, 2)]  # logical ranks and accumulation
        cells = [("uneven", strategy, shape) for strategy, shape in product(STRATEGIES, shapes)]
        cells += [("bart", strategy, shapes[i % len(shapes)]) for i, strategy in enumerate(STRATEGIES)]
        steps = [
            Step(name, strategy, world.size, *shape, inside=world.topology.inside) for name, strategy, shape in cells
        ]
        fsdp_bf16 = {"precision": "bf16", "param_dtype": "bf16", "reduce_dtype": "bf16"}
        steps += [
            Step("uneven", strategy, world.size, *shapes[-1], changes=fsdp_bf16, inside=world.topology.inside)
            for strategy in SHARDED
        ]
        steps.append(
            Step("uneven", "zero1", world.size, changes={"ddp_comm_hook": "power_sgd"}, inside=world.topology.inside)
        )
        counts = []
        for step in steps:
            counts.append(all_gather_object(step.count(world), world))
            gc.collect()  # a DDP module must not outlive the process group
        wrong = {}
        for step, counted in list(zip(steps, counts, strict=True))[world.rank :: world.size]:
            predicted = step.predict()  # takes as long as the step: each rank predicts a part of them
            if counted != [predicted] * world.size:
                wrong[str(step)] = f"{counted}, not {predicted}"
        wrong_on_ranks = all_gather_object(wrong, world)
        if world.is_main_process:
            Path(os.environ["RESULT"]).write_text(json.dumps({"steps": len(steps), "wrong": wrong_on_ranks}))


if __name__ == "__main__":
    fork_ranks()
    divide_among_nodes()
    Program().launch(main)
