"""Run a model on tensors that have a shape, a dtype and a device, but no data: in seconds, for a model of any size.

This gives the order of its gradients and the memory of a micro-batch's activations.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ..common.errors import UserError, raised_by_model
from ..model.dropout import RowDropout, checkpoint_activations
from ..model.hub import first_line
from ..model.load import build_from_config, mixed_precision, training_dtype
from ..model.vocabulary import trim_vocabulary
from ..settings import Settings
from ..strategies.base import add_gradients_per_block

aten = torch.ops.aten


@contextmanager
def without_data(device: torch.device) -> Iterator[None]:
    """Create tensors without data in the block, on a device that need not exist and decides which kernels a model uses.

    Raises:
        UserError: the model's computation depends on the values of tensors, or its own code fails.
    """
    logger = logging.getLogger(fake_tensor.__name__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # when an operation rejects its inputs, it would print a traceback
    try:
        with fake_tensor.FakeTensorMode(), torch.device(device), SuppliedResults():
            yield
    except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException) as problem:
        raise UserError(
            f"this model cannot be planned, because its computation depends on the values of tensors: {problem}"
        ) from None
    except Exception as problem:
        if not raised_by_model(problem):
            raise
        raise UserError(f"this model cannot be planned, because its own code fails: {first_line(problem)}") from None
    finally:
        logger.setLevel(level)


class SuppliedResults(TorchDispatchMode):
    """Supply results that PyTorch cannot compute for tensors without data."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0917 (the caller's signature)
        # Encoder-decoders such as BART and T5 classify the end of a text: they select the hidden state of the
        # end-of-sequence token in each row, and check that all rows have equally many. Here every row has one.
        if operation is aten.unique_consecutive.default:
            counts = args[0].new_empty(1)
            return counts, counts, counts
        if operation is aten.index.Tensor and args[1][0] is not None and args[1][0].dtype is torch.bool:
            rows = torch.zeros_like(args[1][0][:, 0], dtype=torch.int64)
            return operation(args[0], [rows, rows], **(kwargs or {}))
        # Mixtures of experts multiply groups of tokens. Without data, PyTorch accepts bf16 only.
        if operation is aten._grouped_mm.default:
            left, right, *more = args
            return operation(left.bfloat16(), right.bfloat16(), *more, **(kwargs or {})).to(left.dtype)
        return operation(*args, **(kwargs or {}))


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch after its forward and backward passes. Memory is in bytes, without parameters and gradients."""

    model: PreTrainedModel  # has shapes, but no data
    order: list[torch.Tensor]  # the parameters that get a gradient, in the order in which backward() computes them
    saved: int  # memory that the forward pass leaves behind for the backward pass
    peak: int  # the most that exists at one time in the forward and backward passes


def run_micro_batch(
    settings: Settings, config: PretrainedConfig, *, n_tokens: int | None = None, rows: int, device: torch.device
) -> MicroBatch:
    """Run a micro-batch through a new model, both without data. Its rows are padded to `--max_length`.

    Args:
        n_tokens: the number of tokens that the model may get; None: all of its vocabulary.
        device: decides which kernels attention uses.

    Raises:
        UserError: the model does not support `--activation_checkpointing`, or its computation depends on data.
    """
    order: list[torch.Tensor] = []

    def take_gradient(parameter: torch.Tensor) -> None:
        order.append(parameter)
        parameter.grad = None  # the memory of gradients is counted elsewhere

    with without_data(device):
        model = empty_model(settings, config, n_tokens)
        add_gradients_per_block(model)
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            parameter.register_post_accumulate_grad_hook(take_gradient)
        with LiveMemory(known=(*model.parameters(), *model.buffers())) as memory:
            masks = RowDropout(settings.seed, 0, range(rows))
            with mixed_precision(settings.precision, device), masks:
                loss = model(**empty_batch(rows, settings.max_length)).loss
            saved = memory.size
            loss.backward()
    return MicroBatch(model, order, saved, memory.peak)


def empty_model(settings: Settings, config: PretrainedConfig, n_tokens: int | None) -> PreTrainedModel:
    """Return a classifier whose parameters have no data. Call it inside `without_data`."""
    dtype = training_dtype(settings.precision)
    with no_init_weights():
        # What FSDP2 gathers with --param_dtype bf16 is in bf16.
        model = build_from_config(settings, config, dtype=dtype if settings.param_dtype == "fp32" else torch.bfloat16)
    model.tie_weights()  # the initialization would do it
    for module in model.modules():  # model.to(dtype) cannot replace tensors without data
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
    if n_tokens is not None:
        trim_vocabulary(model, np.arange(n_tokens), keep_unused=False)
    if settings.activation_checkpointing:
        checkpoint_activations(model)
    model.train()
    return model


def empty_batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Return rows padded to a length."""
    ids = torch.zeros(rows, length, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": ids + 1, "labels": torch.zeros(rows, dtype=torch.int64)}


class LiveMemory(TorchDispatchMode):
    """Add up the memory of the tensors that operations create, as long as they exist."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak = self.size = 0  # bytes: the most that existed at one time, and those that exist now
        # `_cdata` of the storages that exist, or that are counted elsewhere.
        self.known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0917 (the caller's signature)
        results = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    self.known.add(storage._cdata)
                    self.size += storage.nbytes()
                    # PyTorch keeps the Python object of a storage as long as the storage itself.
                    weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.size)
        return results

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.size -= size
