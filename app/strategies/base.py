"""The interface of a training strategy, and code that the strategies share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from ..common.errors import AgreedError
from ..data.batches import BatchPlan
from .reduction import FixedOrderAllReduce, TreeSum

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


class GradientTree:
    """Sum the gradients of a process's logical ranks one after another, in the order of the fixed tree.

    The sum over the processes is part of backward(): DDP's all-reduce, or FSDP2's reduce-scatter of each logical rank.
    `app.fixed_tree.FixedTree` adds what a loop of one's own needs.
    """

    def __init__(
        self, wrapped: torch.nn.Module, plan: BatchPlan, *, allow_unused: bool, dtype: torch.dtype | None = None
    ) -> None:
        """
        Args:
            allow_unused: whether a parameter may have no gradient.
            dtype: round the gradients of a sharded model to it before they are added; None: do not round.
        """
        self.wrapped, self.plan, self.allow_unused, self.dtype = wrapped, plan, allow_unused, dtype
        self.parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        self.sums = TreeSum()
        self.all_reduce: FixedOrderAllReduce | None = None  # None: another all-reduce, or a sharded model
        self.used: set[int] = set()  # parameters that have a gradient of a logical rank other than the last one
        self.is_checked = False

    def register(self, all_reduce: FixedOrderAllReduce) -> None:
        """Make an all-reduce that has this tree's `sums` DDP's communication hook."""
        assert isinstance(self.wrapped, DistributedDataParallel)
        self.all_reduce = all_reduce
        self.wrapped.register_comm_hook(all_reduce, lambda hook, bucket: hook.average(bucket))

    @contextmanager
    def accumulate(self, number: int) -> Iterator[None]:
        """See `Strategy.accumulate`. DDP's no_sync keeps the gradients of all micro-batches but the last one local."""
        done = number + 1
        is_last = done == self.plan.micro_batches_per_step
        context: AbstractContextManager[Any] = nullcontext()
        if isinstance(self.wrapped, DistributedDataParallel) and not is_last:
            context = self.wrapped.no_sync()
        with record_function(MICRO_BATCH):
            with context:
                yield
            if is_last:
                self._finish()
            elif done % self.plan.accumulation_steps == 0:  # the last of a logical rank, but not of the step
                self._move_gradients_to_sums()

    def _move_gradients_to_sums(self) -> None:
        """Add a logical rank's gradients to the partial sums, and clear them for the next logical rank."""
        self.used |= {i for i, parameter in enumerate(self.parameters) if parameter.grad is not None}
        add = self.sums.add if self.all_reduce is None else self.all_reduce.add
        add(self._rounded(local_parts(map(_gradient, self.parameters))))
        # If DDP searches for unused parameters, it expects a gradient of those that it has seen before.
        keep = self.allow_unused and isinstance(self.wrapped, DistributedDataParallel)
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter) if keep and parameter.grad is not None else None

    def _finish(self) -> None:
        """End a step: all its micro-batches are done."""
        if not isinstance(self.wrapped, DistributedDataParallel):  # DDP's hook has added the partial sums already
            self._add_partial_sums()
        # DDP itself raises only in the next forward pass, after a step with gradients that were not averaged.
        if not self.allow_unused and not self.is_checked:
            self.check_gradients()
        self.is_checked = True
        self.sums.clear()
        self.used.clear()

    def _add_partial_sums(self) -> None:
        """Add the partial sums to the gradients of the last logical rank."""
        if not self.sums.partial_sums and self.dtype is None:
            return
        for i in self.used:  # a parameter may have a gradient of another logical rank only
            self.parameters[i].grad = _gradient(self.parameters[i])
        with_gradient = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
        gradients = local_parts(with_gradient.values())
        rounded = self._rounded(gradients)
        self.sums.add_to_last_leaf(rounded, list(with_gradient))
        if rounded is not gradients:
            torch._foreach_copy_(gradients, rounded)

    def _rounded(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Round gradients. A sum over the ranks stays as it is: `PairwiseReduceScatter` rounded it.

        With one rank, FSDP2 exchanges nothing, so they are not rounded yet.
        """
        return gradients if self.dtype is None else [gradient.to(self.dtype) for gradient in gradients]

    def check_gradients(self) -> None:
        """Check, after the first backward pass over a global batch, that it has reached every parameter.

        Only DDP has to know beforehand which parameters have no gradient. But a run may be resumed with another
        strategy, so all of them give the same answer.
        """
        names = [name for name, p in self.wrapped.named_parameters() if p.requires_grad and p.grad is None]
        if names:
            raise AgreedError(
                f"{len(names)} of the model's parameters, such as {names[0].removeprefix('module.')}, take no part in "
                "classification: add --ddp_find_unused_parameters"
            )

    @record_function(CLIP)
    def clip_grad_norm(self, max_norm: float, loss_scale: torch.Tensor, *, sharded: bool = False) -> torch.Tensor:
        """See `Strategy.clip_grad_norm`. `sharded` gradients are summed over the ranks: collective."""
        gradients = local_parts(parameter.grad for parameter in self.parameters if parameter.grad is not None)
        total = sum_of_squares(gradients).to(loss_scale.device)
        if sharded:
            dist.all_reduce(total)
        norm = (total.sqrt() / loss_scale).to(self.parameters[0].dtype)
        clip_by_norm(gradients, norm, max_norm, loss_scale=loss_scale)
        return norm


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient: zeros if it takes no part in the loss."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


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
