"""Run a model on tensors that have a shape, a dtype and a device, but no data: in seconds, for a model of any size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from app.errors import UserError
from app.model.checkpointing import checkpoint_activations
from app.model.inputs import expand_mask
from app.model.load import build_from_config
from app.model.precision import autocast, training_dtype
from app.settings import Settings

aten = torch.ops.aten


@contextmanager
def without_data(device: torch.device) -> Iterator[None]:
    """Create tensors without data in the block.

    Args:
        device: decides which kernels a model uses. It need not exist.

    Raises:
        UserError: what the model computes depends on the values of tensors.
    """
    try:
        with FakeTensorMode(), torch.device(device), OneEndPerRow():
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as problem:
        raise UserError(f"this model can't be planned, because its computation depends on data: {problem}") from None


class OneEndPerRow(TorchDispatchMode):
    """Supply the values that the forward pass of encoder-decoders such as BART and T5 depends on.

    They classify the end of a text: they select the hidden state of the end-of-sequence token in each row, and check
    that all rows have equally many. Here every row has one.
    """

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, unless the shape of its result depends on the values of its inputs."""
        if operation is aten.unique_consecutive.default:
            counts = args[0].new_empty(1)
            return counts, counts, counts
        if operation is aten.index.Tensor and args[1][0] is not None and args[1][0].dtype is torch.bool:
            rows = torch.zeros_like(args[1][0][:, 0], dtype=torch.int64)
            return operation(args[0], [rows, rows], **(kwargs or {}))
        return operation(*args, **(kwargs or {}))


def empty_model(settings: Settings, config: PretrainedConfig) -> PreTrainedModel:
    """Return a classifier whose parameters have no data. Call and use it inside `without_data`.

    Raises:
        UserError: the model cannot classify sequences, or does not support `--activation_checkpointing`.
    """
    dtype = training_dtype(settings)
    with no_init_weights():
        model = build_from_config(settings, config, dtype=dtype)
    model.tie_weights()  # the initialization would do it
    for module in model.modules():  # model.to(dtype) can't replace tensors without data
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
    if settings.activation_checkpointing:
        checkpoint_activations(model)
    model.train()
    return model


def empty_batch(model: PreTrainedModel, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Return the inputs of a model for a batch with padding, without data. Call it inside `without_data`.

    Args:
        length: the tokens of each row, with padding.
    """
    ids = torch.zeros(rows, length, dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": ids + 1, "labels": torch.zeros(rows, dtype=torch.int64)}
    return expand_mask(batch, model)


def gradient_order(
    model: PreTrainedModel, settings: Settings, rows: int, device: torch.device
) -> list[torch.nn.Parameter]:
    """Return the parameters that take part in a training step, in the order in which backward() computes gradients.

    Call it inside `without_data`, with a model from `empty_model`.
    """
    order: list[torch.nn.Parameter] = []
    hooks = [p.register_post_accumulate_grad_hook(order.append) for p in model.parameters() if p.requires_grad]
    with autocast(settings.precision or "fp32", device):
        loss = model(**empty_batch(model, rows, settings.max_length)).loss
    loss.backward()
    model.zero_grad()
    for hook in hooks:
        hook.remove()
    return order
