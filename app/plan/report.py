"""A plan as Markdown tables, and its verdict: which strategies fit into the memory of a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..common.formats import markdown_table, mib
from ..common.paths import PACKAGE
from ..settings import STRATEGIES
from .step import Plan

Variant = tuple[str, bool]  # strategy, whether --cpu_offload is set
VARIANTS: tuple[Variant, ...] = (*((strategy, False) for strategy in STRATEGIES), ("zero3", True))
TRAFFIC_NOTE = (
    "From the second step on: in the first one, `ddp` and `zero1` exchange all gradients at once. A rank receives as "
    f"much as it sends. `python -m {PACKAGE}.bench.traffic` counts each collective."
)
LEAVING_NOTE = (
    "The bytes that leave a node are those that all of its ranks send to other nodes; all-gathers and all-reduces "
    "among all ranks are assumed to be rings."
)


def describe_plan(plan: Plan, variants: Sequence[Variant] = VARIANTS, budget: int | None = None) -> str:
    """Return the plan of some strategies.

    Args:
        budget: the memory of the device in bytes; by default that of this machine's GPU, if there is one.
    """
    budget = budget or memory_of_device(plan)
    strategies = list(dict.fromkeys(strategy for strategy, _ in variants))
    parts = [
        f"# Plan of a training step\n\n{headline(plan)}\n",
        f"## Memory of the rank that needs most, in MiB\n\n{table_of_memory(plan, variants, budget)}",
        *note_on_kernels(plan),
        f"## Traffic: what a rank sends in a step, in MiB\n\n{table_of_traffic(plan, strategies)}",
        f"{TRAFFIC_NOTE}{f' {LEAVING_NOTE}' if plan.topology.nodes > 1 else ''}\n",
        f"## Verdict\n\n{verdict(plan, variants, budget)}\n",
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


def note_on_kernels(plan: Plan) -> list[str]:
    if plan.device.type != "cpu" or plan.settings.use_cpu:
        return []
    return [
        "Activations are those of CPU kernels, because PyTorch sees no GPU here. Plan on a machine with a GPU to count "
        "those of its kernels.\n"
    ]


def table_of_memory(plan: Plan, variants: Sequence[Variant], budget: int | None) -> str:
    """Return a table of each kind of memory and, if the memory of the device is known, of the rows that fit."""
    rows = []
    for strategy, offload in variants:
        memory = plan.largest_memory(strategy)
        parts = [memory.parameters, memory.gradients, memory.optimizer, memory.gathered, memory.exchange]
        parts += [memory.accumulated + memory.partial_sums, plan.activations(strategy).peak]
        parts += [needed(plan, (strategy, offload)), memory.in_main_memory(offload)]
        fits = [] if budget is None else [f"{rows_that_fit(plan, (strategy, offload), budget):,}"]
        rows.append([label((strategy, offload)), *map(mib, parts), *fits])
    kinds = ["parameters", "gradients", "optimizer", "gathered", "exchange", "accumulated", "activations"]
    totals = ["on the device", "in main memory", *([] if budget is None else ["rows that fit"])]
    return markdown_table(["strategy", *kinds, *totals], rows)


def table_of_traffic(plan: Plan, strategies: Sequence[str]) -> str:
    rows = []
    several_nodes = plan.topology.nodes > 1
    for strategy in strategies:
        collectives = plan.traffic(strategy)
        sent = dict.fromkeys(("gradients", "parameters", "buffers", "norm"), 0.0)
        for collective in collectives:
            sent[collective.purpose] += collective.sent(plan.topology)
        cells = [sent["gradients"], sent["parameters"], sent["buffers"] + sent["norm"], sum(sent.values())]
        if several_nodes:
            cells.append(sum(collective.leaving(plan.topology) for collective in collectives))
        rows.append([strategy, *map(mib, cells)])
    header = ["strategy", "gradients", "parameters", "buffers and norm", "total"]
    return markdown_table(header + (["leaves a node"] if several_nodes else []), rows)


def label(variant: Variant) -> str:
    """Return the flags of a strategy."""
    strategy, cpu_offload = variant
    return f"{strategy} --cpu_offload" if cpu_offload else strategy


def memory_of_device(plan: Plan) -> int | None:
    """Return the memory of the GPU that a rank trains on, or None on a CPU, where the plan does not know it."""
    return torch.cuda.get_device_properties(plan.device).total_memory if plan.device.type == "cuda" else None


def needed(plan: Plan, variant: Variant) -> int:
    """Return the memory of the device in a step, on the rank that needs most."""
    strategy, cpu_offload = variant
    return plan.largest_memory(strategy).on_device(cpu_offload) + plan.activations(strategy).peak


def rows_that_fit(plan: Plan, variant: Variant, budget: int) -> int:
    """Return the largest micro-batch, a power of two, that fits into the memory of a device; 0 if none does."""
    strategy, cpu_offload = variant
    free, rows = budget - plan.largest_memory(strategy).on_device(cpu_offload), 1
    while plan.count(rows, strategy).peak <= free:
        rows *= 2
    return rows // 2


def verdict(plan: Plan, variants: Sequence[Variant], budget: int | None) -> str:
    """Return which strategies fit into the memory of the device."""
    if budget is None:
        return (
            f"The memory of the device is unknown: `python -m {PACKAGE}.plan --device_memory 24GiB` tells what fits "
            "into it."
        )
    fitting = [f"`{label(variant)}`" for variant in variants if needed(plan, variant) <= budget]
    less = (
        "Smaller micro-batches (--gradient_accumulation_steps), --activation_checkpointing and --precision bf16 need "
        "less. "
    )
    return (
        f"With this batch, into {mib(budget)} MiB fits: {', '.join(fitting) or 'none'}. {'' if fitting else less}Not "
        "included: the memory of the CUDA context, of the libraries and of fragmentation."
    )
