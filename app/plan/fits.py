"""The strategies that fit into the memory of a device, and the flags to change if none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from ..common.formats import markdown_table, mib
from ..common.paths import PACKAGE
from ..settings import STRATEGIES
from .empty_model import Activations
from .step import Plan

Variant = tuple[str, bool]  # strategy, whether --cpu_offload is set
VARIANTS: tuple[Variant, ...] = (*((strategy, False) for strategy in STRATEGIES), ("zero3", True))
LEFT_OUT = "Not included: the memory of the CUDA context, of the libraries and of fragmentation."
SAME_TRAFFIC = 1.01  # strategies that differ by less than this factor, such as by DDP's buffers, send the same


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


def traffic_of(plan: Plan, variant: Variant) -> tuple[float, float]:
    """Return the bytes that leave a node in a step, and the bytes that a rank sends."""
    strategy, _ = variant
    return sum(plan.leaving(strategy).values()), sum(plan.sent(strategy).values())


def cheapest(plan: Plan, variants: list[Variant]) -> str:
    """Return the strategy that sends least: between the nodes if there are several. Ties go to the simpler strategy."""
    several_nodes = plan.topology.nodes > 1
    traffic = {variant: traffic_of(plan, variant) for variant in variants}
    compared = {variant: leaving if several_nodes else sent for variant, (leaving, sent) in traffic.items()}
    chosen = next(variant for variant in variants if compared[variant] <= min(compared.values()) * SAME_TRAFFIC)
    leaving, sent = traffic[chosen]
    per_node = f", and {mib(leaving)} MiB leave each node" if several_nodes else ""
    return f"`{label(chosen)}` (each rank sends {mib(sent)} MiB per step{per_node})"


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
    """Return the strategies that fit into the memory of the device and the one that sends least, or flags to change."""
    sizes = {variant: needed(plan, variant) for variant in VARIANTS}
    smallest = min(sizes, key=lambda variant: sizes[variant])
    least = f"`{label(smallest)}` needs the least: {mib(sizes[smallest])} MiB"
    if budget is None:
        return (
            f"The memory of the device is unknown: `python -m {PACKAGE}.plan --device_memory 24GiB` tells what fits "
            f"into it. {least}. {cheapest(plan, list(VARIANTS))} sends the least.\n"
        )
    if fitting := [variant for variant in VARIANTS if sizes[variant] <= budget]:
        names = ", ".join(f"`{label(variant)}`" for variant in fitting)
        which = f"every strategy fits into {mib(budget)} MiB"
        if len(fitting) < len(VARIANTS):
            which = f"{names} {'fit' if len(fitting) > 1 else 'fits'} into {mib(budget)} MiB, the others do not"
        return f"With this batch, {which}. The least communication: {cheapest(plan, fitting)}. {LEFT_OUT}\n"
    none = f"With this batch, no strategy fits into {mib(budget)} MiB: {least}."
    for flags, changed in changes(plan):
        if fitting := [variant for variant in VARIANTS if needed(changed, variant) <= budget]:
            return (
                f"{none} With `{flags}`, the least communication that fits: {cheapest(changed, fitting)}. {LEFT_OUT}\n"
            )
    return f"{none} Nothing that keeps the model and --max_length makes it fit: use a device with more memory.\n"


def changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield flags that save memory, and the plan with them: first those that keep the precision.

    More ranks would not help: `zero3 --cpu_offload` holds no shards on the device.
    """
    settings, batches = plan.settings, plan.batches
    bf16 = [{}, {"precision": "bf16"}] if settings.precision == "fp32" else [{}]
    can_checkpoint = plan.model.supports_gradient_checkpointing and not settings.activation_checkpointing
    checkpointing = [{}, {"activation_checkpointing": True}] if can_checkpoint else [{}]
    factors = [n for n in range(1, batches.micro_size + 1) if batches.micro_size % n == 0]
    for precision, factor, checkpoint in product(bf16, factors, checkpointing):
        size, steps = batches.micro_size // factor, batches.accumulation_steps * factor
        parts = ["--activation_checkpointing"] if checkpoint else []
        if factor > 1:  # the same rows per step, in smaller micro-batches
            parts.append(f"--gradient_accumulation_steps {steps}")
            if settings.per_device_train_batch_size is not None:
                parts.append(f"--per_device_train_batch_size {settings.per_device_train_batch_size // factor}")
        flags = " ".join([*parts, *(["--precision bf16"] if precision else [])])
        count = partial(plan.count, **precision, **checkpoint)
        changed = replace(plan, batches=replace(batches, micro_size=size, accumulation_steps=steps), count=count)
        if flags:
            yield flags, changed
