"""The interface of a training strategy, and code that the strategies share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from ..common.errors import AgreedError
from ..data.sampler import BatchPlan

Tensors = dict[str, torch.Tensor]
# Ranges in a trace of torch.profiler, by which app/profiling/breakdown.py tells the parts of a step apart.
MICRO_BATCH = "micro-batch"  # the forward and backward passes of one micro-batch
SHARDED_FORWARD = "ShardedModel.forward"
FORWARD = ("DistributedDataParallel.forward", SHARDED_FORWARD)  # PyTorch records the first one itself
CLIP = "clip_grad_norm"
START_CLOCK = "start_clock"  # training time is measured again, after a checkpoint or an evaluation
CHUNK = 1 << 15  # elements that are converted to fp64 at a time: 256 KiB, which fits into a core's cache


class Strategy(Protocol):
    """How parameters, gradients and optimizer state are distributed over the ranks.

    `model` is the plain module, and `wrapped` is the result of `wrap`. Methods that gather or load are collective:
    under a sharded strategy no rank holds the complete state, so every rank has to take part.
    """

    name: str  # the value of `--strategy`
    plan: BatchPlan
    logical_ranks: Sequence[int]  # of this process, in the order in which it trains on their micro-batches
    shards_optimizer: bool  # whether each rank holds a different part of the optimizer's state

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the module whose forward and backward passes train the model on all ranks. Collective.

        The model is complete, on the CPU. Here it is placed on this rank's device, one block after another if sharded.
        """

    def build_optimizer(self, groups: Sequence[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
        """Return AdamW, with its `options`, for the parameters of the wrapped model that this rank updates."""

    def local_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the AdamW that holds this rank's state; `optimizer` is the result of `build_optimizer`."""

    def accumulate(self, wrapped: torch.nn.Module, number: int) -> AbstractContextManager[Any]:
        """Return the context of the forward and backward passes of micro-batch `number` (from 0) of a step. Collective.

        Inside it, backward() adds to the gradients of the same logical rank. When the last micro-batch of a step is
        done, the gradients are summed over all logical ranks and divided by the number of ranks.
        """

    def clip_grad_norm(self, max_norm: float, loss_scale: torch.Tensor) -> torch.Tensor:
        """Divide the gradients by the loss scale, and scale them down if their norm exceeds `max_norm`. Collective.

        The squares are summed in fp64 and the norm is rounded to fp32, which removes the rounding errors of the sum. So
        the norm does not depend on how the gradients are sharded (docs/same_bits.md names the limits).

        Returns:
            The norm of the unscaled gradients before clipping, a scalar, equal on every rank.
        """

    def gather_model_state(self, model: torch.nn.Module) -> Tensors:
        """Return the complete state dict on rank 0, and an empty one on the other ranks. Collective."""


class GradientCheck:
    """Check once, after the first backward pass over a global batch, that it has reached every parameter.

    Only DDP has to know beforehand which parameters have no gradient. But a run may be resumed with another strategy,
    so all of them give the same answer.
    """

    def __init__(self, find_unused_parameters: bool) -> None:
        self.is_due = not find_unused_parameters

    def __call__(self, model: torch.nn.Module) -> None:
        """Raise `AgreedError` if a parameter has had no gradient, unless that is checked already or not requested."""
        if not self.is_due:
            return
        self.is_due = False
        parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        unused = [name for name, parameter in parameters if parameter.grad is None]
        if unused:
            raise AgreedError(
                f"{len(unused)} of the model's parameters, such as {unused[0]}, take no part in classification: add "
                "--ddp_find_unused_parameters"
            )


def sum_of_squares(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the squares of all elements, a scalar, accumulated in fp64."""
    tensors = list(tensors)
    if tensors and tensors[0].is_cuda:
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64)).square().sum()
    total = torch.zeros((), dtype=torch.float64)
    # Converting a whole tensor to fp64 would write it to main memory and read it again.
    buffer = torch.empty(CHUNK, dtype=torch.float64)
    for tensor in tensors:
        for chunk in tensor.flatten().split(CHUNK):
            converted = buffer[: len(chunk)].copy_(chunk)
            total += torch.dot(converted, converted)
    return total


def clip_by_norm(
    gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float, *, loss_scale: torch.Tensor
) -> None:
    """Divide gradients by the loss scale, and multiply them by `max_norm / norm` if that is less than 1, in place.

    The host does not wait for the norm. This is the formula of `torch.nn.utils.clip_grad_norm_`.
    """
    if gradients:
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0) / loss_scale
        if not coefficient.is_cuda and coefficient == 1:  # a product with 1 would read and write every gradient
            return
        torch._foreach_mul_(list(gradients), coefficient.to(gradients[0].device))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of this rank's shard of a tensor, or of all of it if it is not sharded."""
    return local_parts([tensor])[0] if isinstance(tensor, DTensor) else tensor


@torch.no_grad()  # otherwise autograd records the operations, which takes longer than the operations
def local_parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return what `local_part` returns for each tensor, in less time."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def rows_of(tensor: torch.Tensor) -> tuple[int | None, int]:
    """Return the first row and the number of rows of this rank's shard; (None, 0) if the tensor is not sharded."""
    if not isinstance(tensor, DTensor):
        return None, 0
    mesh = tensor.device_mesh
    return divide_rows(tensor.shape[0], mesh.get_local_rank(), mesh.size())


def divide_rows(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first row of a rank and the number of its rows."""
    chunk = -(-rows // ranks)  # as torch.chunk does: the last ranks may have fewer rows, or none
    start = min(rank * chunk, rows)
    return start, min(chunk, rows - start)


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
    sum would round differently. Here each block gets a view, whose gradient is the sum over the block.
    """

    def pass_views(block: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda t: t.view_as(t) if t.requires_grad else t, (args, kwargs))

    for block in transformer_blocks(model):
        block.register_forward_pre_hook(pass_views, with_kwargs=True)
