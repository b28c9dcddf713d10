"""Wait for the GPU where a failed rank is noticed, right before a model waits for it by reading a result."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..distributed.collectives import wait_for_device
from ..distributed.world import World

# Reads by the host: of values, and of the number of elements that a condition selects.
READS = frozenset(
    {
        *(torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__),
        *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__contains__, torch.Tensor.cpu, torch.Tensor.numpy),
        *(torch.Tensor.nonzero, torch.nonzero, torch.Tensor.argwhere, torch.argwhere),
        *(torch.Tensor.masked_select, torch.masked_select, torch.bincount, torch.Tensor.bincount),
        *(torch.unique, torch.Tensor.unique, torch.unique_consecutive, torch.Tensor.unique_consecutive),
        *(torch.equal, torch.Tensor.equal, torch.allclose, torch.Tensor.allclose),
    }
)


class WaitBeforeReads(TorchFunctionMode):
    """Call `wait_for_device` before an operation that makes the host wait for this rank's device.

    Such an operation waits inside CUDA, where Python cannot raise if another rank has failed. A single wait before the
    forward pass would not do: the host would wait there, and again for what was enqueued since then.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor: Any = None
        if func in READS or (func is torch.where and len(args) == 1):
            tensor = args[0] if args else (kwargs or {}).get("input")
        elif func is torch.Tensor.__getitem__:
            tensor = _condition(args[1])
        if isinstance(tensor, torch.Tensor) and tensor.device.type == self.world.device.type:
            wait_for_device(self.world)
        return func(*args, **(kwargs or {}))


def _condition(index: Any) -> torch.Tensor | None:
    """Return the part of an index that selects elements by a condition, if there is one."""
    parts = index if isinstance(index, tuple) else (index,)
    return next((part for part in parts if isinstance(part, torch.Tensor) and part.dtype is torch.bool), None)
