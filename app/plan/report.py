"""A plan as Markdown tables, and its verdict: which strategies fit into the memory of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, product

import torch

from ..common.formats import markdown_table, mib
from ..common.paths import PACKAGE
from ..settings import STRATEGIES
from .empty_model import Activations
from .step import Plan

Variant = tuple[str, bool]  # strategy, whether --cpu_offload is set
VARIANTS: tuple[Variant, ...] = (*((strategy, False) for strategy in STRATEGIES), ("zero3", True))
SAME_TRAFFIC = 1.01  # strategies that differ by less than this factor, such as by DDP's buffers, send the same
LEFT_OUT = "Not included: the memory of the CUDA context, of the libraries and of fragmentation."
TRAFFIC_NOTE = (
    "From the second step on: in the first one, `ddp` and `zero1` exchange all gradients at once. A rank receives as "
    "much as it sends. Sizes are those of the tensor that is reduced, sent or gathered. The bytes that leave a node "
    "are those that all of its ranks send to other nodes; all-gathers and all-reduces among all ranks are assumed to "
    "be rings."
)


def describe_plan(plan: Plan, budget: int | None = None) -> str:
    """Return the plan of every strategy.

    Args:
        budget: the memory of the device in bytes; by default that of this machine's GPU, if there is one.
    """
    budget = budget or memory_of_device(plan)
    parts = _tables(plan, VARIANTS)
    if budget is not None:
        parts.append(f"## What fits into {mib(budget)} MiB\n\n{table_of_what_fits(plan, budget)}")
    return "\n".join([*parts, f"## Verdict\n\n{verdict(plan, budget)}\n"])


def describe_run_plan(plan: Plan) -> str:
    """Return the plan of the strategy that the settings choose."""
    offload = plan.settings.cpu_offload and plan.device.type == "cuda"  # no effect on CPUs
    return "\n".join(
        [*_tables(plan, [(plan.settings.strategy, offload)]), "## Verdict\n", verdict(plan, memory_of_device(plan))]
    )


def _tables(plan: Plan, variants: Sequence[Variant]) -> list[str]:
    strategies = list(dict.fromkeys(strategy for strategy, _ in variants))
    return [
        f"# Plan of a training step\n\n{headline(plan)}\n",
        f"## Memory of the rank that needs most, in MiB\n\n{table_of_memory(plan, variants)}",
        *notes_on_memory(plan),
        f"## Activations, in MiB\n\n{table_of_activations(plan)}",
        f"## Traffic: what a rank sends in a step, in MiB\n\n{table_of_traffic(plan, strategies)}",
        f"## Collectives of a step, in bytes\n\n{table_of_collectives(plan, strategies)}\n{TRAFFIC_NOTE}\n",
    ]


def headline(plan: Plan) -> str:
    settings = plan.settings
    n = sum(parameter.numel() for parameter in plan.model.parameters())
    checkpointing = ", activation checkpointing" if settings.activation_checkpointing else ""
    return (
        f"{settings.model}: {n / 1e6:.1f} M parameters; {plan.batches}; {settings.max_length} tokens per row, "
        f"{settings.precision}{checkpointing}"
    )


def notes_on_memory(plan: Plan) -> list[str]:
    notes = [
        f"At the start, each rank loads the complete model into main memory: {mib(plan.start)} MiB for each rank of a "
        "node. `zero2` and `zero3` then move one block at a time to the device, which needs less there than a step.\n"
    ]
    if plan.device.type == "cpu" and not plan.settings.use_cpu:
        notes.append(
            "Activations are those of CPU kernels, because PyTorch sees no GPU here. Plan on a machine with a GPU to "
            "count those of its kernels.\n"
        )
    return notes


def table_of_memory(plan: Plan, variants: Sequence[Variant]) -> str:
    rows = []
    for strategy, offload in variants:
        memory = plan.largest_memory(strategy)
        parts = [memory.parameters, memory.gradients, memory.optimizer, memory.gathered, memory.exchange]
        activations = plan.activations(strategy).peak
        parts += [memory.accumulated + memory.partial_sums, activations]
        parts += [memory.on_device(offload) + activations, memory.in_main_memory(offload)]
        rows.append([label((strategy, offload)), *map(mib, parts)])
    kinds = ["parameters", "gradients", "optimizer", "gathered", "exchange", "accumulated", "activations"]
    return markdown_table(["strategy", *kinds, "on the device", "in main memory"], rows)


def table_of_activations(plan: Plan) -> str:
    """Return a table of the chosen strategy with other precisions, with and without activation checkpointing."""
    settings = plan.settings
    # With fp64, parameters and gradients are in fp64 too, and the plan has no others. The same applies to gathered
    # parameters in bf16.
    only_own = settings.precision == "fp64" or settings.param_dtype == "bf16"
    precisions = [settings.precision] if only_own else dict.fromkeys(("fp32", "bf16", settings.precision))
    checkpointing = (False, True) if plan.model.supports_gradient_checkpointing else (False,)
    rows = []
    for precision, on in product(precisions, checkpointing):
        changes = {"precision": precision, "activation_checkpointing": on}
        counted = plan.count(plan.batches.micro_size, settings.strategy, **changes)
        rows.append([precision, "yes" if on else "no", *map(mib, (counted.saved, counted.weights, counted.peak))])
    header = ["precision", "checkpointing", "kept for the backward pass", "16-bit weights (included)", "peak"]
    return markdown_table(header, rows, text_columns=2)


def table_of_traffic(plan: Plan, strategies: Sequence[str]) -> str:
    rows = []
    several_nodes = plan.topology.nodes > 1
    for strategy in strategies:
        sent = plan.sent(strategy)
        other = sum(sent.values()) - sent["gradients"] - sent["parameters"]
        cells = [sent["gradients"], sent["parameters"], other, sum(sent.values())]
        cells += [sum(plan.leaving(strategy).values())] if several_nodes else []
        rows.append([strategy, *map(mib, cells)])
    header = ["strategy", "gradients", "parameters", "buffers and norm", "total"]
    return markdown_table(header + (["leaves a node"] if several_nodes else []), rows)


def table_of_collectives(plan: Plan, strategies: Sequence[str]) -> str:
    """Return a table with one line per bucket, block or rank. Neighbors that are alike share a line."""
    rows = []
    several_nodes = plan.topology.nodes > 1
    for strategy in strategies:
        for _, group in groupby(plan.traffic(strategy), key=lambda collective: replace(collective, what="")):
            same = list(group)
            first, last = same[0].what, same[-1].what  # such as `bucket 2` and `bucket 7`
            what = first if len(same) == 1 else f"{first} to {last.split()[-1]}"
            sent = sum(collective.sent(plan.topology) for collective in same)
            times = sum(collective.times for collective in same)
            names = [strategy, same[0].purpose, what, same[0].operation]
            cells = [f"{same[0].size:,}", f"{times:,}", f"{sent:,.0f}"]
            if several_nodes:
                names.append(same[0].among)
                cells.append(f"{sum(collective.leaving(plan.topology) for collective in same):,.0f}")
            rows.append(names + cells)
    names = ["strategy", "purpose", "what", "operation"] + (["among"] if several_nodes else [])
    numbers = ["size", "times", "sent per rank"] + (["leaves a node"] if several_nodes else [])
    return markdown_table(names + numbers, rows, text_columns=len(names))


# ---- what fits -------------------------------------------------------------------------------------------------------


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


def sends_least(plan: Plan, variants: Sequence[Variant]) -> str:
    """Return the strategy that sends least: between the nodes if there are several. Ties go to the simpler strategy."""
    count = plan.leaving if plan.topology.nodes > 1 else plan.sent
    traffic = {variant: sum(count(variant[0]).values()) for variant in variants}
    chosen = next(variant for variant in variants if traffic[variant] <= min(traffic.values()) * SAME_TRAFFIC)
    where = "leave each node" if plan.topology.nodes > 1 else "sent by each rank"
    return f"`{label(chosen)}` ({mib(traffic[chosen])} MiB {where} per step)"


def table_of_what_fits(plan: Plan, budget: int) -> str:
    """Return a table with the largest micro-batch of each strategy that fits into the memory of a device."""
    rows = []
    for strategy, offload in VARIANTS:
        free = budget - plan.largest_memory(strategy).on_device(offload)
        largest = largest_that_fits(free, partial(plan.count, strategy=strategy))
        rows.append([label((strategy, offload)), mib(max(0, free)), str(largest) if largest else "does not fit"])
    return markdown_table(["strategy", "left for activations", "rows per micro-batch"], rows)


def largest_that_fits(free: int, count: Callable[[int], Activations]) -> int:
    """Return the largest number of rows whose activations need at most `free` bytes."""
    if count(1).peak > free:
        return 0

    def estimate(low: int, high: int) -> int:
        """Return the largest number of rows that fits if the memory grows as it does from `low` to `high` rows."""
        growth = max(1.0, (count(high).peak - count(low).peak) / (high - low))
        return low + int((free - count(low).peak) / growth)

    fits, too_many = 1, 2
    while count(too_many).peak <= free:
        fits, too_many = too_many, max(too_many, estimate(fits, too_many)) + 1
    while too_many - fits > 1:
        middle = min(max(estimate(fits, too_many), fits + 1), too_many - 1)
        fits, too_many = (middle, too_many) if count(middle).peak <= free else (fits, middle)
    return fits


def verdict(plan: Plan, budget: int | None) -> str:
    """Return the strategies that fit into the memory of the device and the one of them that sends least."""
    sizes = {variant: needed(plan, variant) for variant in VARIANTS}
    smallest = min(sizes, key=lambda variant: sizes[variant])
    least = f"`{label(smallest)}` needs the least: {mib(sizes[smallest])} MiB"
    if budget is None:
        return (
            f"The memory of the device is unknown: `python -m {PACKAGE}.plan --device_memory 24GiB` tells what fits "
            f"into it. {least}. {sends_least(plan, VARIANTS)} sends the least."
        )
    fitting = [variant for variant in VARIANTS if sizes[variant] <= budget]
    if not fitting:
        return (
            f"With this batch, no strategy fits into {mib(budget)} MiB: {least}. Smaller micro-batches "
            "(--gradient_accumulation_steps), --activation_checkpointing and --precision bf16 need less. "
            f"{LEFT_OUT}"
        )
    names = ", ".join(f"`{label(variant)}`" for variant in fitting)
    which = f"{names} {'fit' if len(fitting) > 1 else 'fits'} into {mib(budget)} MiB, the others do not"
    if len(fitting) == len(VARIANTS):
        which = f"every strategy fits into {mib(budget)} MiB"
    return f"With this batch, {which}. The least communication: {sends_least(plan, fitting)}. {LEFT_OUT}"
