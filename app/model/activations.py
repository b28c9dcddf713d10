"""Count the memory of a micro-batch's activations by running the model on tensors without data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from app.hardware import DTYPES
from app.model.load import checkpoint_activations


@dataclass(frozen=True)
class Activations:
    """The memory of one micro-batch, in bytes, without parameters and their gradients.

    Attributes:
        saved: what the forward pass keeps for the backward pass.
        peak: the most that exists at one time in the forward and backward passes, including what is saved.
    """

    saved: int
    peak: int


def empty_model(config: PretrainedConfig, precision: str, activation_checkpointing: bool = False) -> PreTrainedModel:
    """Return a classifier whose parameters have shapes but no memory. Call and use it in a FakeTensorMode."""
    dtype = torch.float64 if precision == "fp64" else torch.float32
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    if activation_checkpointing:
        checkpoint_activations(model)
    model.train()
    return model


def count_activations(
    config: PretrainedConfig,
    rows: int,
    length: int,
    device: torch.device,
    precision: str = "fp32",
    activation_checkpointing: bool = False,
) -> Activations:
    """Count the activations of a micro-batch from the model's own forward and backward passes.

    Tensors have shapes, dtypes and a device, but no data, so this takes a second for a model of any size.

    Args:
        rows: the rows of the micro-batch.
        length: the tokens of each row, with padding.
        device: decides which kernels attention uses, and so what they save.
    """
    with FakeTensorMode(), torch.device(device):
        model = empty_model(config, precision, activation_checkpointing)
        parameters = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_free_gradient)  # gradients are counted elsewhere
        ids = torch.zeros(rows, length, dtype=torch.int64)
        batch = {"input_ids": ids, "attention_mask": ids + 1, "labels": torch.zeros(rows, dtype=torch.int64)}
        saved: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in parameters:
                saved[storage._cdata] = storage
            return tensor

        memory = LiveMemory(parameters)
        mixed = precision in ("bf16", "fp16")
        with memory:
            with saved_tensors_hooks(keep, _unchanged), torch.autocast(device.type, DTYPES[precision], enabled=mixed):
                loss = model(**batch).loss
            n_saved = sum(storage.nbytes() for storage in saved.values())
            saved.clear()  # backward() frees them one after another
            loss.backward()
    return Activations(n_saved, memory.peak)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _free_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


class LiveMemory(TorchDispatchMode):
    """Add up the memory of the tensors that operations create, as long as they exist.

    Attributes:
        peak: the most bytes that existed at one time.
    """

    def __init__(self, ignored: Collection[int]) -> None:
        """
        Args:
            ignored: `_cdata` of the storages that are counted elsewhere.
        """
        super().__init__()
        self.ignored, self.peak = ignored, 0
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the memory of its results unless it is shared with other tensors."""
        results = operation(*args, **(kwargs or {}))
        self.live = {key: (storage, size) for key, (storage, size) in self.live.items() if not storage.expired()}
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.live and storage._cdata not in self.ignored:
                    self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return results
