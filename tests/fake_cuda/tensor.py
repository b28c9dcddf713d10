"""Tensors that PyTorch treats as CUDA tensors, with the data of CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from fake_cuda import guard
from fake_cuda.memory import memory_of


class FakeCuda(torch.Tensor):
    """A tensor that PyTorch treats as a CUDA tensor.

    Attributes:
        cpu_data: its numbers.
    """

    cpu_data: torch.Tensor

    @staticmethod
    def __new__(cls, real: torch.Tensor, device: torch.device) -> FakeCuda:
        layout = {"strides": real.stride(), "storage_offset": real.storage_offset(), "dtype": real.dtype}
        fake: FakeCuda = torch.Tensor._make_wrapper_subclass(cls, real.size(), device=device, **layout)
        fake.cpu_data = real.detach()
        return fake

    def __init__(self, real: torch.Tensor, device: torch.device) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        from fake_cuda.operations import execute  # which imports this module

        return execute(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    # Libraries compare addresses, so there are some.

    def data_ptr(self) -> int:
        return self.cpu_data.data_ptr()

    def untyped_storage(self) -> Any:
        return self.cpu_data.untyped_storage()

    def record_stream(self, stream: Any) -> None:
        use_on_stream(self, stream.stream_id)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return FakeCuda(self.cpu_data, self.device)

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction():  # a function mode would call the setter of torch.Tensor instead
            torch._C.TensorBase.data.__set__(self, new)
        assert isinstance(new, FakeCuda)
        self.cpu_data = new.cpu_data


def use_on_stream(tensor: FakeCuda, stream: int) -> None:
    """Make the allocator wait for a stream before it reuses the memory of a tensor."""
    memory_of(tensor.cpu_data, guard.current_stream(tensor.device.index)).recorded.add(stream)


def resolve(device: Any) -> torch.device:
    """Return a device with its number: `cuda` means the current one."""
    device = torch.device(device)
    return torch.device("cuda", guard.device()) if device.type == "cuda" and device.index is None else device


def wrap(real: torch.Tensor, device: torch.device) -> FakeCuda:
    """Return a CPU tensor as a tensor on a device, whose memory is allocated on the current stream."""
    memory_of(real, guard.current_stream(device.index))
    return FakeCuda(real, device)


def tensors_in(*things: Any) -> list[torch.Tensor]:
    """Return the tensors in arguments or results of an operation."""
    return [leaf for leaf in tree_leaves(things) if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], Any], thing: Any) -> Any:
    """Return arguments or results of an operation with a function applied to their tensors."""
    return tree_map_only(torch.Tensor, function, thing)


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the CPU tensor that stands for a CUDA tensor, or a CPU tensor itself."""
    return tensor.cpu_data if isinstance(tensor, FakeCuda) else tensor
