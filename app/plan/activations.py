"""Count the memory of a micro-batch's activations by running the model on tensors without data."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from ..model.precision import mixed_precision
from ..settings import Settings
from .empty_model import empty_batch, empty_model, without_data

aten = torch.ops.aten


@dataclass(frozen=True)
class Activations:
    """The memory of one micro-batch, in bytes, without parameters and their gradients.

    Attributes:
        saved: kept by the forward pass for the backward pass.
        peak: the most that exists at one time in the forward and backward passes.
        weights: the part of `saved` that is copies of parameters in 16 bits, which mixed precision multiplies.
    """

    saved: int
    peak: int
    weights: int = 0


def count_activations(settings: Settings, config: PretrainedConfig, *, rows: int, device: torch.device) -> Activations:
    """Count the activations of a micro-batch from the model's own forward and backward passes.

    Tensors have shapes, dtypes and a device, but no data, so this takes a second for a model of any size. The device
    decides which kernels attention uses.

    Args:
        rows: the rows of the micro-batch, each padded to `--max_length`.

    Raises:
        UserError: as for `empty_model` and `without_data`.
    """
    with without_data(device):
        model = empty_model(settings, config)
        parameters = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            parameter.register_post_accumulate_grad_hook(_free_gradient)  # gradients are counted elsewhere
        saved: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in parameters:
                saved[storage._cdata] = storage
            return tensor

        memory = LiveMemory(parameters)
        with memory:
            batch = empty_batch(model, rows, settings.max_length)
            with saved_tensors_hooks(keep, lambda tensor: tensor), mixed_precision(settings.precision, device):
                loss = model(**batch).loss
            n_saved = sum(storage.nbytes() for storage in saved.values())
            n_weights = sum(storage.nbytes() for key, storage in saved.items() if key in memory.copies)
            saved.clear()  # backward() frees them one after another
            loss.backward()
    return Activations(n_saved, memory.peak, n_weights)


def _free_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


class LiveMemory(TorchDispatchMode):
    """Add up the memory of the tensors that operations create, as long as they exist.

    Attributes:
        peak: the most bytes that existed at one time.
        ignored: `_cdata` of the storages that are counted elsewhere.
        copies: `_cdata` of the storages that are ignored ones in another dtype.
    """

    def __init__(self, ignored: Collection[int]) -> None:
        super().__init__()
        self.peak = self.size = 0
        self.ignored, self.known = frozenset(ignored), set(ignored)
        self.copies: set[int] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0917 (the caller's signature)
        results = operation(*args, **(kwargs or {}))
        is_copy = operation is aten._to_copy.default and args[0].untyped_storage()._cdata in self.ignored
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    self.known.add(storage._cdata)
                    self.size += storage.nbytes()
                    if is_copy:
                        self.copies.add(storage._cdata)
                    # PyTorch keeps the Python object of a storage as long as the storage itself.
                    weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.size)
        return results

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.copies.discard(key)
        self.size -= size
