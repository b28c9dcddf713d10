"""The section of the laboratory on when gradients are ready: figure 2 (c, d) of Li et al. 2020.

DDP can exchange a gradient as soon as it is ready. How much of the exchange can be hidden depends on how early that is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from markupsafe import Markup
from matplotlib.figure import Figure as Canvas

from ...common.charts import SERIES_COLORS, render_svg
from ...common.formats import MIB, mib
from ...distributed.collectives import all_gather_object, wait_for_device
from ...distributed.world import World
from ...model.inputs import to_device
from ...model.precision import mixed_precision
from ...settings import Settings
from ...training.build import ReviewData
from ..charts import format_seconds
from ..page import Figure, Part, Section, Table
from ..rounds import time_calls
from ..steps import Bench, build_named, distribute, plain_ddp
from .step_variants import models

PASSES, WARM_UP = 10, 2  # backward passes
BUCKET = 25 * MIB
TITLE = "When gradients are ready"
ABOUT = (
    "A backward pass without communication on every rank, and all-reduces of the same bytes in buckets of 25 MiB, one "
    "after another, without computation. docs/communication.md#readiness."
)


@dataclass(frozen=True)
class Readiness:
    """When gradients are ready, and how long their exchange takes.

    Attributes:
        seconds: from the beginning of the backward pass to each gradient, in this order; the median over the passes of
            the slowest rank.
        sizes: bytes of each gradient.
        exchange: seconds until each bucket has been exchanged, and its bytes.
    """

    seconds: Sequence[float]
    sizes: Sequence[int]
    exchange: Sequence[tuple[float, int]]

    @property
    def half(self) -> float:
        """Return after how many seconds half of the bytes are ready."""
        done = np.cumsum(self.sizes)
        return float(self.seconds[int(np.searchsorted(done, done[-1] / 2))])


def measure_readiness(settings: Settings, data: ReviewData, *, seconds: float, world: World) -> Section:
    """Measure the backward pass and the exchange of its gradients for each model. Collective."""
    settings = plain_ddp(settings)
    found = {}
    for name in models(settings.model):
        bench = distribute(settings, data, build_named(name, settings, data, world=world), world=world)
        sizes, times = time_gradients(bench)
        found[name] = Readiness(times, sizes, time_exchange(sum(sizes), seconds, settings.disable_tqdm, world=world))
    parts: list[Part] = []
    if world.is_main_process:
        parts += [Figure(f"{TITLE}: {name}", readiness_chart(name, measured)) for name, measured in found.items()]
    rows = []
    for name, measured in found.items():
        last, exchange = measured.seconds[-1], measured.exchange[-1][0]
        times_shown = [measured.seconds[0], measured.half, last, exchange]
        rows.append([name, mib(sum(measured.sizes)), *map(format_seconds, times_shown), f"{exchange / last:.2f}"])
    header = ["", "gradients, MiB", "first ready", "half ready", "all ready", "all-reduce", "all-reduce / backward"]
    content = {
        name: {"seconds": measured.seconds, "bytes": measured.sizes, "exchange": measured.exchange}
        for name, measured in found.items()
    }
    return Section("readiness", TITLE, [ABOUT], [*parts, Table("Backward pass and exchange", header, rows)], content)


def time_gradients(bench: Bench) -> tuple[list[int], list[float]]:
    """Return the bytes of each gradient and when it is ready, in the order in which they are. Collective."""
    model, world = bench.model, bench.world
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in model.named_parameters()}
    clock = Clock(world.device)
    handles = [
        parameter.register_post_accumulate_grad_hook(partial(clock.record, name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    passes = []
    model.train()
    for number, batch in enumerate(islice(repeated(bench.loader), PASSES + WARM_UP)):
        with mixed_precision(bench.settings.precision, world.device):
            loss = model(**to_device(batch, model, world)).loss
        clock.start()
        loss.backward()
        wait_for_device(world)
        times = clock.read()
        if number >= WARM_UP:
            passes.append([times.get(name, 0.0) for name in names])
        model.zero_grad()
    for handle in handles:
        handle.remove()
    medians = np.median(np.asarray(all_gather_object(passes, world)), axis=1).max(axis=0)
    ready = sorted((float(seconds), name) for name, seconds in zip(names, medians, strict=True) if seconds)
    return [sizes[name] for _, name in ready], [seconds for seconds, _ in ready]


class Clock:
    """The times of gradients after the beginning of a backward pass, on the clock of the device."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.times: dict[str, Any] = {}

    def start(self) -> None:
        self.times = {}
        self.began = self._now()

    def record(self, name: str, parameter: torch.Tensor) -> None:
        """Record that the gradient of a parameter is ready, as a hook."""
        self.times[name] = self._now()

    def read(self) -> dict[str, float]:
        """Return the seconds by name. The device must have finished."""
        if self.on_gpu:
            return {name: self.began.elapsed_time(event) / 1000 for name, event in self.times.items()}
        return {name: moment - self.began for name, moment in self.times.items()}

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def time_exchange(size: int, seconds: float, disable_tqdm: bool, *, world: World) -> list[tuple[float, int]]:
    """Return when each bucket of `size` bytes in total has been exchanged, and its bytes. Collective."""
    buckets = torch.zeros(size // 4, device=world.device).split(BUCKET // 4)
    calls: dict[int, Callable[[], object]] = {n: partial(exchange, buckets[: n + 1]) for n in range(len(buckets))}
    times = time_calls(calls, seconds / len(buckets), world, disable_tqdm=disable_tqdm)
    return [(statistics.median(times[n]), 4 * buckets[n].numel()) for n in calls]


def exchange(buckets: Sequence[torch.Tensor]) -> None:
    """Average buckets one after another. Collective."""
    for bucket in buckets:
        dist.all_reduce(bucket)


def repeated(loader: Any) -> Any:
    """Yield the first batch of a loader again and again: batches of other lengths would take other times."""
    batch = next(iter(loader))
    while True:
        yield batch


def readiness_chart(name: str, measured: Readiness) -> Markup:
    """Draw the share of bytes that are ready, and that have been exchanged, over time."""

    def draw(canvas: Canvas) -> None:
        axes = canvas.add_subplot(xlabel="milliseconds from the beginning", ylabel="share of the bytes, %")
        total = sum(measured.sizes)
        ready = 100 * np.cumsum([0, *measured.sizes]) / total
        axes.step([0, *(1000 * t for t in measured.seconds)], ready, where="post", color=SERIES_COLORS[0])
        axes.lines[-1].set_label("gradients that are ready")
        sent = 100 * np.cumsum([0, *(size for _, size in measured.exchange)]) / total
        moments = [0, *(1000 * t for t, _ in measured.exchange)]
        axes.plot(moments, sent, "o--", color=SERIES_COLORS[1], markersize=5, label="all-reduce of the same bytes")
        axes.set_ylim(0, 105)
        axes.legend(loc="lower right")

    return render_svg(300, f"{TITLE}: {name}", draw)
