"""A plan as Markdown tables, and its verdict: which strategies fit into the memory of a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..common.formats import markdown_table, mib
from ..common.paths import PACKAGE
from ..distributed.collectives import raise_on_all_ranks
from ..distributed.world import World
from ..settings import Settings
from ..training.console import block, resume_facts
from ..training.prepare import resolve_settings
from .memory import RankMemory, plan_memory
from .step import Plan, build_plan
from .traffic import plan_traffic

TRAFFIC_NOTE = (
    "From the second step on: in the first one, `ddp` and `zero1` exchange all gradients at once. A rank receives as "
    f"much as it sends. `python -m {PACKAGE}.bench.traffic` counts each collective."
)
KERNELS_NOTE = (
    "Activations are those of CPU kernels, because PyTorch sees no GPU here. Plan on a machine with a GPU to count "
    "those of its kernels.\n"
)
LEAVING_NOTE = (
    "The bytes that leave a node are those that all of its ranks send to other nodes; all-gathers and all-reduces "
    "among all ranks are assumed to be rings."
)


def print_plan(path_name: str, given: Settings, world: World) -> None:
    """Print the plan of a run instead of training (`--dry_run`). Collective.

    Mistakes in the settings, the reviews and the model's config are reported as by the run. No weights are loaded, and
    nothing is written.
    """
    settings, resume = resolve_settings(path_name, given, world)
    with raise_on_all_ranks(world):
        if world.is_main_process:
            text = describe_plans([build_plan(settings, world.topology)])
            print("\n\n".join(filter(None, [block(resume_facts(resume)), text])), flush=True)


def describe_plans(plans: Sequence[Plan], budget: int | None = None) -> str:
    """Return the plans of a step with some strategies.

    Args:
        budget: the memory of the device in bytes; by default that of this machine's GPU, if there is one.
    """
    plan = plans[0]
    if budget is None and plan.on_gpus:
        budget = torch.cuda.get_device_properties(plan.device).total_memory
    parts = [
        f"# Plan of a training step\n\n{headline(plan)}\n",
        f"## Memory of the rank that needs most, in MiB\n\n{table_of_memory(plans, budget)}",
        *([] if plan.on_gpus or plan.settings.use_cpu else [KERNELS_NOTE]),
        f"## Traffic: what a rank sends in a step, in MiB\n\n{table_of_traffic(plans)}",
        f"{TRAFFIC_NOTE}{f' {LEAVING_NOTE}' if plan.topology.nodes > 1 else ''}\n",
        f"## Verdict\n\n{verdict(plans, budget)}\n",
    ]
    return "\n".join(parts)


def headline(plan: Plan) -> str:
    settings = plan.settings
    n = sum(parameter.numel() for parameter in plan.model.parameters())
    checkpointing = ", activation checkpointing" if settings.activation_checkpointing else ""
    return (
        f"{settings.model}: {n / 1e6:.1f} M parameters; {plan.batches}; {settings.max_length} tokens per row, "
        f"{settings.precision}{checkpointing}"
    )


def table_of_memory(plans: Sequence[Plan], budget: int | None) -> str:
    """Return a table of each kind of memory and, if the memory of the device is known, of the rows that fit."""
    rows = []
    for plan in plans:
        memory = largest_memory(plan)
        parts = [memory.parameters, memory.gradients, memory.optimizer, memory.gathered, memory.exchange]
        parts += [
            memory.accumulated + memory.partial_sums,
            plan.activations().peak,
            needed(plan),
            memory.in_main_memory,
        ]
        fits = [] if budget is None else [f"{rows_that_fit(plan, budget):,}"]
        rows.append([plan.flags, *map(mib, parts), *fits])
    kinds = ["parameters", "gradients", "optimizer", "gathered", "exchange", "accumulated", "activations"]
    totals = ["on the device", "in main memory", *([] if budget is None else ["rows that fit"])]
    return markdown_table(["strategy", *kinds, *totals], rows)


def table_of_traffic(plans: Sequence[Plan]) -> str:
    rows = []
    header = ["strategy", "gradients", "parameters", "buffers and norm", "total"]
    if plans[0].topology.nodes > 1:
        header.append("leaves a node")
    for plan in {plan.strategy: plan for plan in plans}.values():
        sent = dict.fromkeys(("gradients", "parameters", "buffers", "norm"), 0.0)
        leaving = 0.0
        for collective in plan_traffic(plan):
            sent[collective.purpose] += collective.sent(plan.topology)
            leaving += collective.leaving(plan.topology)
        cells = [sent["gradients"], sent["parameters"], sent["buffers"] + sent["norm"], sum(sent.values()), leaving]
        rows.append([plan.strategy, *map(mib, cells)][: len(header)])
    return markdown_table(header, rows)


def largest_memory(plan: Plan) -> RankMemory:
    """Return the memory of the rank that needs most."""
    return max(plan_memory(plan), key=lambda memory: memory.on_device)


def needed(plan: Plan) -> int:
    """Return the memory of the device in a step, on the rank that needs most."""
    return largest_memory(plan).on_device + plan.activations().peak


def rows_that_fit(plan: Plan, budget: int) -> int:
    """Return the largest micro-batch, a power of two, that fits into the memory of a device; 0 if none does."""
    free, rows = budget - largest_memory(plan).on_device, 1
    while plan.activations(rows).peak <= free:
        rows *= 2
    return rows // 2


def verdict(plans: Sequence[Plan], budget: int | None) -> str:
    """Return which strategies fit into the memory of the device."""
    if budget is None:
        return (
            f"The memory of the device is unknown: `python -m {PACKAGE}.plan --device_memory 24GiB` tells what fits "
            "into it."
        )
    fitting = [f"`{plan.flags}`" for plan in plans if needed(plan) <= budget]
    less = (
        "Smaller micro-batches (--gradient_accumulation_steps), --activation_checkpointing and --precision bf16 need "
        "less. "
    )
    return (
        f"With this batch, into {mib(budget)} MiB fits: {', '.join(fitting) or 'none'}. {'' if fitting else less}Not "
        "included: the memory of the CUDA context, of the libraries and of fragmentation."
    )
