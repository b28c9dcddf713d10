"""The replacement of torch.cuda: streams, events, devices, random numbers and properties."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from fake_cuda import guard
from fake_cuda.report import REPORT
from fake_cuda.tensor import resolve

NAME, DEVICES = "NVIDIA H100 80GB HBM3", 8  # as many as in guard.cpp
# A seed of the CPU's generator does not seed that of the GPU. A process draws numbers on one GPU only.
GENERATOR = torch.Generator()


class Stream(torch.Stream):
    """A stream, in the place of torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: int) -> Stream:
        return super().__new__(cls, **ids) if ids else super().__new__(cls, device=resolve(device or "cuda"))

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        REPORT.count_wait("Stream.synchronize()", guard.wait(self.stream_id))


class Event(torch.Event):
    """An event, in the place of torch.cuda.Event."""

    def __new__(cls, *_: Any, **__: Any) -> Event:
        return super().__new__(cls, device="cuda")

    def synchronize(self, method: str = "synchronize") -> None:
        REPORT.count_wait(f"Event.{method}()", guard.wait_event(self.event_id))

    def query(self) -> bool:
        """Wait and return True: a program that polls would wait as well."""
        self.synchronize("query")
        return True


def current_stream(device: Any = None) -> Stream:
    """Return the current stream of a device."""
    current = torch._C._accelerator_getStream(resolve("cuda" if device is None else device).index)
    return Stream(stream_id=current.stream_id, device_index=current.device_index, device_type=current.device_type)


def synchronize(device: Any = None) -> None:
    """Make the host wait for all streams."""
    REPORT.count_wait("torch.cuda.synchronize()", guard.wait_all())


@contextlib.contextmanager
def random_numbers_of_device() -> Iterator[None]:
    """Draw random numbers from the device's generator in this block: the CPU's own stays as it is."""
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(GENERATOR.get_state())
    try:
        yield
    finally:
        GENERATOR.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


def install() -> None:
    """Replace the functions that a build of PyTorch without CUDA lacks."""
    properties = SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, gcnArchName="", warp_size=32
    )
    replacements: dict[str, Any] = {
        # devices
        "is_available": lambda: True,
        "_initialized": True,  # torch.utils.checkpoint asks, before it keeps the state of the generator
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: DEVICES,
        "current_device": guard.device,
        "set_device": lambda device: torch.accelerator.set_device_index(resolve(device).index),
        "_exchange_device": torch._C._accelerator_exchangeDevice,
        "_maybe_exchange_device": torch._C._accelerator_maybeExchangeDevice,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        # streams and events
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "set_stream": torch.accelerator.set_stream,
        "synchronize": synchronize,
        "is_current_stream_capturing": lambda: False,
        # random numbers
        "manual_seed": GENERATOR.manual_seed,
        "manual_seed_all": GENERATOR.manual_seed,
        "get_rng_state": lambda device=None: GENERATOR.get_state(),
        "set_rng_state": lambda state, device=None: GENERATOR.set_state(state),
        "get_rng_state_all": lambda: [GENERATOR.get_state()] * DEVICES,
        "set_rng_state_all": lambda states: GENERATOR.set_state(states[0]),
        # memory is not counted
        "max_memory_allocated": lambda device=None: 0,
        "empty_cache": lambda: None,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.nccl.version = lambda: (2, 29, 3)
    torch.accelerator.current_stream = current_stream  # type: ignore[assignment]
    torch.accelerator.synchronize = synchronize
