"""Each GPU has random numbers of its own: a seed of the CPU's generator does not seed it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from fake_cuda import guard
from fake_cuda.tensor import resolve

STATES: dict[int, torch.Tensor] = {}  # of the generators, by device


def seed(number: int, device: int | None = None) -> None:
    """Seed the generator of a device, by default of the current one."""
    STATES[guard.device() if device is None else device] = torch.Generator().manual_seed(number).get_state()


def seed_all(number: int) -> None:
    """Seed the generators of all devices."""
    for device in range(torch.cuda.device_count()):
        seed(number, device)


def get_states() -> list[torch.Tensor]:
    """Return copies of the states of all generators."""
    return [get_state(device) for device in range(torch.cuda.device_count())]


def set_states(states: Iterable[torch.Tensor]) -> None:
    """Set the states of all generators."""
    for device, state in enumerate(states):
        set_state(state, device)


def get_state(device: int | str | torch.device = "cuda") -> torch.Tensor:
    """Return a copy of a generator's state, on the CPU."""
    index = _index(device)
    if index not in STATES:
        seed(0, index)
    return STATES[index].clone()


def set_state(state: torch.Tensor, device: int | str | torch.device = "cuda") -> None:
    """Set a generator's state."""
    STATES[_index(device)] = state.clone()


@contextmanager
def of_device() -> Iterator[None]:
    """Draw random numbers from the current device's generator in this block: the CPU's own stays as it is."""
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(get_state())
    try:
        yield
    finally:
        set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


def _index(device: int | str | torch.device) -> int:
    return device if isinstance(device, int) else resolve(device).index
