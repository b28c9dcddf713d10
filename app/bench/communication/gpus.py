"""Sections of the laboratory that need GPUs: NCCL and gloo, and DataParallel and DDP."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from ...common.errors import UserError
from ...common.formats import format_size, mib
from ...data.sampler import plan_batches
from ...distributed.collectives import barrier
from ...distributed.world import World
from ...model.inputs import to_device
from ...model.precision import mixed_precision
from ...settings import Settings
from ...training.build import ReviewData
from ..charts import format_seconds
from ..page import Section, Table
from ..rounds import ratios, time_calls
from ..steps import TOTAL_STEPS, build_named, distribute, endless, plain_ddp
from .collectives import prepare
from .collectives_section import ELEMENT, sizes_up_to
from .step_variants import models

ON_BOTH = ("all-reduce", "broadcast")  # the collectives that gloo offers for tensors on GPUs
DDP, DATA_PARALLEL = "DistributedDataParallel", "DataParallel"
LEARNING_RATE = 1e-4
ABOUT_BACKENDS = (
    "The same collectives on tensors in GPU memory. gloo copies them to main memory and sends them from there: "
    "docs/communication.md#nccl-and-gloo."
)
ABOUT_DATA_PARALLEL = (
    "A step on the same number of rows. DataParallel is one process, rank 0, for all GPUs; the other ranks wait. "
    "docs/communication.md#dataparallel gives the reasons for the difference."
)


def check_gpus(name: str, world: World, *, at_least: int = 1) -> None:
    """Raise `UserError` if a section needs more GPUs than there are on this node."""
    if world.device.type != "cuda" or torch.cuda.device_count() < at_least:
        reason = {"backends": "NCCL connects GPUs only", "data_parallel": "DataParallel divides a batch among GPUs"}
        raise UserError(f"needs {at_least} or more GPUs: {reason[name]}")


# ---- NCCL and gloo ---------------------------------------------------------------------------------------------------


def measure_backends(world: World, largest: int, *, seconds_per_point: float, disable_tqdm: bool) -> Section:
    """Time collectives on GPUs over NCCL and over gloo. Collective."""
    gloo = dist.new_group(backend="gloo", timeout=world.timeout)
    groups = {"NCCL": None, "gloo": gloo}
    sizes = sizes_up_to(largest, world.size)
    complete, other = (torch.zeros(sizes[-1] // ELEMENT, device=world.device) for _ in range(2))
    calls: dict[tuple[str, str, int], Callable[[], object]] = {}
    for size in sizes:
        rows, received = (tensor[: size // ELEMENT].view(world.size, -1) for tensor in (complete, other))
        for name in ON_BOTH:
            for backend, group in groups.items():
                calls[name, backend, size] = prepare(name, rows, received, world=world, group=group)
    times = time_calls(calls, seconds_per_point, world, disable_tqdm=disable_tqdm)
    dist.destroy_process_group(gloo)
    rows_of_table = []
    for name in ON_BOTH:
        for size in sizes:
            nccl, slower = (times[name, backend, size] for backend in groups)
            medians = [format_seconds(statistics.median(seconds)) for seconds in (nccl, slower)]
            relative = [f"{number:.2f}" for number in ratios(slower, nccl)]
            rows_of_table.append([name, format_size(size), *medians, *relative])
    header = ["", "size", "NCCL", "gloo", "gloo / NCCL", "lowest", "highest"]
    data = {f"{name}, {backend}, {size} bytes": seconds for (name, backend, size), seconds in times.items()}
    table = Table("NCCL and gloo", header, rows_of_table)
    return Section("backends", "NCCL and gloo on GPUs", [ABOUT_BACKENDS], [table], data)


# ---- DataParallel ----------------------------------------------------------------------------------------------------


def measure_data_parallel(settings: Settings, data: ReviewData, *, seconds: float, world: World) -> Section:
    """Time a step of DataParallel and of DDP on the same number of rows, and count the memory of GPU 0. Collective."""
    settings = replace(plain_ddp(settings), gradient_accumulation_steps=1)
    rows: list[list[str]] = []
    content: dict[str, Any] = {}
    for model in models(settings.model):
        steps = {
            DDP: ddp_step(model, settings, data, world=world),
            DATA_PARALLEL: data_parallel_step(model, settings, data, world=world),
        }
        memory = {name: memory_of_step(step, world) for name, step in steps.items()}
        times = time_calls(steps, seconds, world, disable_tqdm=settings.disable_tqdm)
        for name in steps:
            relative = [f"{number:.3f}" for number in ratios(times[name], times[DDP])]
            rows.append([model, name, format_seconds(statistics.median(times[name])), *relative, mib(memory[name])])
        content[model] = {name: {"seconds": times[name], "bytes_on_gpu_0": memory[name]} for name in steps}
    header = ["", "", "time per step", "relative", "lowest", "highest", "GPU 0 in a step, MiB"]
    table = Table("DataParallel and DDP", header, rows, "The memory that a step needs beside weights and moments.")
    return Section("data_parallel", "DataParallel and DDP", [ABOUT_DATA_PARALLEL], [table], content)


def ddp_step(model: str, settings: Settings, data: ReviewData, *, world: World) -> Callable[[], object]:
    """Return a function that trains one step with DDP. Collective, and so is the function."""
    bench = distribute(settings, data, build_named(model, settings, data, world=world), world=world)
    batches = list(islice(endless(bench.loader), bench.data.plan.micro_batches_per_step))
    return partial(bench.train_steps, batches, bench.optimization(TOTAL_STEPS), steps=1)


def data_parallel_step(model: str, settings: Settings, data: ReviewData, *, world: World) -> Callable[[], object]:
    """Return a function that trains one step of the same global batch with DataParallel on rank 0. Collective."""
    network: torch.nn.Module = build_named(model, settings, data, world=world)
    if not world.is_main_process:
        return lambda: None
    wrapped = torch.nn.DataParallel(network.to(world.device).train())  # on all GPUs that rank 0 sees
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, fused=True)
    size = plan_batches(settings, len(data.split.train), world.size).global_size
    batch = to_device(data.collator([data.train_rows[row] for row in range(size)]), network, world)

    def step() -> None:
        with mixed_precision(settings.precision, world.device):
            loss = wrapped(**batch).loss.mean()  # of one loss per GPU, gathered on GPU 0
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), settings.max_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()

    return step


def memory_of_step(step: Callable[[], object], world: World) -> int:
    """Return the bytes that rank 0 allocates on its GPU during a step, beside those that it keeps. Collective."""
    step()  # allocates the optimizer's state
    barrier(world)
    if world.device.type != "cuda":
        step()
        return 0
    before = torch.cuda.memory_allocated(world.device)
    torch.cuda.reset_peak_memory_stats(world.device)
    step()
    return torch.cuda.max_memory_allocated(world.device) - before
