"""The transformer blocks of a model, which FSDP2 shards, and how gradients flow into them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel


def transformer_blocks(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the modules whose parameters are sharded and gathered together, from the innermost to the outermost.

    The model lists their classes in `_no_split_modules`. The remaining parameters are gathered together with the model.
    """
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if len(blocks) < (getattr(model.config, "num_hidden_layers", None) or 0):
        return []  # such as ALBERT, which runs one block several times: its gradient would be reduced after each time
    return [block for block in reversed(blocks) if not _shares_parameters(block, model)]


def sharded_groups(model: PreTrainedModel) -> list[list[torch.nn.Parameter]]:
    """Return the parameters that FSDP2 gathers together: of each block, then the parameters outside of all blocks."""
    groups: list[list[torch.nn.Parameter]] = []
    for module in (*transformer_blocks(model), model):
        earlier = {parameter for group in groups for parameter in group}
        groups.append([parameter for parameter in module.parameters() if parameter not in earlier])
    return groups


def _shares_parameters(block: torch.nn.Module, model: torch.nn.Module) -> bool:
    """Tell whether a block has tied parameters, which other parts of the model use as well."""
    inside = [parameter for _, parameter in block.named_parameters(remove_duplicate=False)]
    everywhere = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    return any(everywhere.count(id(parameter)) > 1 for parameter in inside)


def add_gradients_per_block(model: PreTrainedModel) -> None:
    """Make autograd add the gradients of a tensor within each block first, as it does under FSDP2.

    FSDP2 passes the inputs of a block through an autograd function. Several decoder blocks use the encoder's output, in
    two places each. Without such a function, autograd would add the gradients of all places one after another, and the
    sum would round differently.
    """
    for block in transformer_blocks(model):
        block.register_forward_pre_hook(_pass_through_one_function, with_kwargs=True)


def _pass_through_one_function(
    block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    inputs, structure = tree_flatten((args, kwargs))
    places = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor) and value.requires_grad]
    if not places or not torch.is_grad_enabled():
        return None
    for i, same in zip(places, _Identity.apply(*[inputs[i] for i in places]), strict=True):
        inputs[i] = same
    unchanged: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(inputs, structure)
    return unchanged


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients
