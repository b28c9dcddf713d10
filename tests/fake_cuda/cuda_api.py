"""The replacement of torch.cuda: streams, events, devices, memory statistics and properties."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from fake_cuda import guard, random_numbers
from fake_cuda.guard import HOST
from fake_cuda.memory import ALLOCATOR, wait_on_host
from fake_cuda.report import REPORT, FakeCudaError, where
from fake_cuda.tensor import resolve

NAME, MEMORY = "NVIDIA H100 80GB HBM3", 80 << 30


class Stream:
    """A stream, in the place of torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, stream_id: int | None = None, **_: Any) -> None:
        self.device, self.priority = resolve("cuda" if device is None else device), priority
        self.device_index = self.device.index
        self.stream_id = guard.new_stream() if stream_id is None else stream_id

    def wait_stream(self, other: Stream) -> None:
        guard.join(other.stream_id, self.stream_id)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        wait_on_host("Stream.synchronize()", self.stream_id)

    def query(self) -> bool:
        self.synchronize()
        return True

    def is_capturing(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)


class Event:
    """An event, in the place of torch.cuda.Event. Its times are the host's."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.handle: int | None = None
        self.recorded_at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.handle = guard.event_record(self.handle, (stream or current_stream()).stream_id)
        self.recorded_at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        guard.event_block(self.handle, (stream or current_stream()).stream_id)

    def synchronize(self) -> None:
        self._wait_on_host("synchronize")

    def query(self) -> bool:
        """Wait and return True: a program that polls would wait as well."""
        self._wait_on_host("query")
        return True

    def _wait_on_host(self, method: str) -> None:
        if guard.event_busy(self.handle):
            REPORT.waits[f"Event.{method}() at {where()}"] += 1
        guard.event_block(self.handle, HOST)

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.recorded_at - self.recorded_at)


def current_stream(device: Any = None) -> Stream:
    """Return the current stream of a device."""
    device = resolve("cuda" if device is None else device)
    return Stream(device, stream_id=guard.current_stream(device.index))


def synchronize(device: Any = None) -> None:
    """Make the host wait for all streams."""
    if any(guard.busy(stream) for stream in range(guard.stream_count())):
        REPORT.waits[f"torch.cuda.synchronize() at {where()}"] += 1
    for stream in range(guard.stream_count()):
        guard.join(stream, HOST)


@contextlib.contextmanager
def use_stream(stream: Stream | None) -> Iterator[None]:
    """Make a stream the current one of its device in this block, as `torch.cuda.stream` does."""
    if stream is None:
        yield
        return
    before = guard.current_stream(stream.device_index)
    guard.set_stream(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        guard.set_stream(stream.device_index, before)


@contextlib.contextmanager
def use_device(device: Any) -> Iterator[None]:
    """Make a device the current one in this block, as `torch.cuda.device` does."""
    before = guard.device()
    if device is not None:
        set_device(device)
    try:
        yield
    finally:
        guard.set_device(before)


def set_device(device: Any) -> None:
    """Make a device the current one.

    Raises:
        FakeCudaError: there is no such device.
    """
    index = device if isinstance(device, int) else torch.device(device).index
    if index is None or index < 0:
        return
    if index >= torch.cuda.device_count():
        raise FakeCudaError(f"CUDA error: invalid device ordinal: {index} of {torch.cuda.device_count()}")
    guard.set_device(index)


def _reset_peak(device: Any = None) -> None:
    REPORT.peak_bytes = ALLOCATOR.allocated


def install(devices: int) -> None:
    """Replace the functions that a build of PyTorch without CUDA lacks.

    Args:
        devices: how many GPUs this node has.
    """
    guard.set_device_count(devices)
    properties = SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=MEMORY, multi_processor_count=132, gcnArchName="", warp_size=32
    )
    replacements: dict[str, Any] = {
        # devices
        "is_available": lambda: True,
        "_initialized": True,  # torch.utils.checkpoint asks, before it keeps the state of the generator
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: devices,
        "current_device": guard.device,
        "set_device": set_device,
        "device": use_device,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        # streams and events
        "Stream": Stream,
        "Event": Event,
        "stream": use_stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(device, stream_id=0),
        "set_stream": lambda stream: guard.set_stream(stream.device_index, stream.stream_id),
        "synchronize": synchronize,
        "is_current_stream_capturing": lambda: False,
        # random numbers
        "manual_seed": random_numbers.seed,
        "manual_seed_all": random_numbers.seed_all,
        "get_rng_state": random_numbers.get_state,
        "set_rng_state": random_numbers.set_state,
        "get_rng_state_all": random_numbers.get_states,
        "set_rng_state_all": random_numbers.set_states,
        # memory
        "memory_allocated": lambda device=None: ALLOCATOR.allocated,
        "max_memory_allocated": lambda device=None: REPORT.peak_bytes,
        "memory_reserved": lambda device=None: ALLOCATOR.allocated,
        "max_memory_reserved": lambda device=None: REPORT.peak_bytes,
        "reset_peak_memory_stats": _reset_peak,
        "reset_max_memory_allocated": _reset_peak,
        "reset_max_memory_cached": _reset_peak,
        "memory_stats": lambda device=None: {},
        "mem_get_info": lambda device=None: (MEMORY - ALLOCATOR.allocated, MEMORY),
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        # ranges in a profile
        "nvtx": SimpleNamespace(range_push=lambda text: 0, range_pop=lambda: 0, range=contextlib.nullcontext),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.nccl.version = lambda: (2, 29, 3)
    torch.accelerator.current_stream = current_stream  # type: ignore[assignment]
    torch.accelerator.synchronize = synchronize
