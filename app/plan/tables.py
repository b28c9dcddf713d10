"""A plan as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from ..common.formats import markdown_table, mib
from ..distributed.world import powers_of_two
from ..settings import STRATEGIES
from ..training.console import advise_checkpointing
from .empty_model import Activations
from .fits import VARIANTS, Variant, label, memory_of_device, table_of_what_fits, verdict
from .step import Plan
from .traffic import Collective

MOST_RANKS = 1024
RANKS_NOTE = "Each rank has the micro-batches of this plan, so the global batch grows with the number of ranks."
TRAFFIC_NOTE = (
    "From the second step on: in the first one, `ddp` and `zero1` exchange all gradients at once. A rank receives as "
    "much as it sends. Sizes are those of the tensor that is reduced, sent or gathered."
)
NODES_NOTE = (
    "These are the bytes that all ranks of a node send to other nodes. All-gathers and all-reduces among all ranks are "
    "assumed to be rings."
)


def describe_plan(plan: Plan, budget: int | None = None) -> str:
    """Return the plan of every strategy, for a memory of the device in bytes, by default this machine's GPU's."""
    by_ranks = table_of_traffic_by_ranks(plan, plan.sent)
    parts = [
        f"# Plan of a training step\n\n{headline(plan)}\n",
        f"## Memory of the rank that needs most, in MiB\n\n{table_of_memory(plan, VARIANTS)}",
        *notes_on_memory(plan),
        f"## Memory of the device by the number of ranks, in MiB\n\n{table_of_memory_by_ranks(plan)}\n{RANKS_NOTE}\n",
        f"## Activations, in MiB\n\n{table_of_activations(plan)}",
        f"## Traffic: what a rank sends in a step, in MiB\n\n{table_of_traffic(plan, STRATEGIES)}",
        f"## Traffic by the number of ranks, in MiB\n\n{by_ranks}\n{RANKS_NOTE}\n",
    ]
    if plan.topology.nodes > 1:
        nodes = table_of_traffic_by_ranks(plan, plan.leaving)
        parts.append(f"## Traffic that leaves a node, by the number of ranks, in MiB\n\n{nodes}\n{NODES_NOTE}\n")
    parts.append(f"## Collectives of a step, in bytes\n\n{table_of_collectives(plan, STRATEGIES)}\n{TRAFFIC_NOTE}\n")
    budget = budget or memory_of_device(plan)
    if budget is not None:
        parts.append(f"## What fits into {mib(budget)} MiB\n\n{table_of_what_fits(plan, budget)}")
    parts.append(f"## Verdict\n\n{verdict(plan, budget)}")
    return "\n".join(parts)


def describe_run_plan(plan: Plan) -> str:
    """Return the plan of the strategy that the settings choose."""
    strategy = plan.settings.strategy
    offload = plan.settings.cpu_offload and plan.device.type == "cuda"  # no effect on CPUs
    return "\n".join(
        [
            f"{headline(plan)}\n",
            f"Memory of the rank that needs most, in MiB:\n\n{table_of_memory(plan, [(strategy, offload)])}",
            *notes_on_memory(plan),
            *(f"{line}\n" for line in advise_checkpointing(plan.settings, plan.model, plan.batches.ranks)),
            f"Traffic: what a rank sends in a step, in MiB:\n\n{table_of_traffic(plan, [strategy])}",
            f"Collectives of a step, in bytes:\n\n{table_of_collectives(plan, [strategy])}",
            f"{TRAFFIC_NOTE}\n",
            f"Verdict: {verdict(plan, memory_of_device(plan))}".rstrip(),
        ]
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


def headline(plan: Plan) -> str:
    settings = plan.settings
    n = sum(parameter.numel() for parameter in plan.model.parameters())
    checkpointing = ", activation checkpointing" if settings.activation_checkpointing else ""
    return (
        f"{settings.model}: {n / 1e6:.1f} M parameters; {plan.batches}; {settings.max_length} tokens per row, "
        f"{settings.precision}{checkpointing}"
    )


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


def numbers_of_ranks(plan: Plan) -> list[int]:
    return powers_of_two(plan.topology.inside if plan.topology.nodes > 1 else 1, MOST_RANKS)


def table_of_memory_by_ranks(plan: Plan) -> str:
    """Return a table with one line per strategy, precision and checkpointing, and one column per number of ranks."""
    numbers = numbers_of_ranks(plan)
    by_strategy = {strategy: [plan.largest_memory(strategy, ranks) for ranks in numbers] for strategy in STRATEGIES}
    rows = []
    for precision, checkpointing, count in activation_variants(plan):
        for strategy, offload in VARIANTS:
            activations = count(strategy).peak
            cells = [mib(memory.on_device(offload) + activations) for memory in by_strategy[strategy]]
            rows.append([label((strategy, offload)), precision, checkpointing, *cells])
    header = ["strategy", "precision", "checkpointing", *(f"{ranks:,}" for ranks in numbers)]
    return markdown_table(header, rows, text_columns=3)


def table_of_activations(plan: Plan) -> str:
    strategy = plan.settings.strategy
    counted = [(names, count(strategy)) for *names, count in activation_variants(plan)]
    rows = [[*names, *map(mib, (a.saved, a.weights, a.peak))] for names, a in counted]
    header = ["precision", "checkpointing", "kept for the backward pass", "16-bit weights (included)", "peak"]
    return markdown_table(header, rows, text_columns=2)


def activation_variants(plan: Plan) -> Iterator[tuple[str, str, Callable[[str], Activations]]]:
    """Yield precision, checkpointing (yes or no), and the activations of a micro-batch, by strategy."""
    own = plan.settings.precision
    # With fp64, parameters and gradients are in fp64 too, and the plan has no others. The same applies to gathered
    # parameters in bf16.
    only_own = own == "fp64" or plan.settings.param_dtype == "bf16"
    for precision in (own,) if only_own else dict.fromkeys(("fp32", "bf16", own)):
        for checkpointing in (False, True) if plan.model.supports_gradient_checkpointing else (False,):
            changes = {"precision": precision, "activation_checkpointing": checkpointing}
            count = partial(plan.count, plan.batches.micro_size, **changes)
            yield precision, "yes" if checkpointing else "no", count


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


def table_of_traffic_by_ranks(plan: Plan, count: Callable[[str, int], dict[str, float]]) -> str:
    """Return a table of `plan.sent` or `plan.leaving` with one line per strategy and one column per number of ranks."""
    numbers = numbers_of_ranks(plan)
    rows = [[name, *(mib(sum(count(name, n).values())) for n in numbers)] for name in STRATEGIES]
    return markdown_table(["strategy", *(f"{ranks:,}" for ranks in numbers)], rows)


def table_of_collectives(plan: Plan, strategies: Sequence[str]) -> str:
    """Return a table with one line per bucket, block or rank. Neighbors that are alike share a line."""
    rows = []
    several_nodes = plan.topology.nodes > 1
    for strategy in strategies:
        for _, group in groupby(plan.traffic(strategy), key=lambda collective: replace(collective, what="")):
            same = list(group)
            sent = sum(collective.sent(plan.topology) for collective in same)
            times = sum(collective.times for collective in same)
            cells = [f"{same[0].size:,}", f"{times:,}", f"{sent:,.0f}"]
            names = [strategy, same[0].purpose, name_of(same), same[0].operation]
            if several_nodes:
                names.append(same[0].among)
                cells.append(f"{sum(collective.leaving(plan.topology) for collective in same):,.0f}")
            rows.append(names + cells)
    names = ["strategy", "purpose", "what", "operation"] + (["among"] if several_nodes else [])
    numbers = ["size", "times", "sent per rank"] + (["leaves a node"] if several_nodes else [])
    return markdown_table(names + numbers, rows, text_columns=len(names))


def name_of(collectives: Sequence[Collective]) -> str:
    """Name collectives whose names end with consecutive numbers."""
    first, last = collectives[0].what, collectives[-1].what
    return first if len(collectives) == 1 else f"{first} to {last.split()[-1]}"
