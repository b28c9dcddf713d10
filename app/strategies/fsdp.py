"""Fully sharded training (FSDP2): each rank holds a shard of parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor
from torch.profiler import record_function
from transformers import PreTrainedModel

from ..common.machine import DTYPES
from ..data.sampler import BatchPlan
from ..distributed.world import RankGroup, World
from ..settings import Settings
from .base import (
    CLIP,
    MICRO_BATCH,
    SHARDED_FORWARD,
    GradientCheck,
    Tensors,
    clip_by_norm,
    local_parts,
    sum_of_squares,
    transformer_blocks,
)
from .reduction import TreeSum, reduce_scatter_pairwise


class ShardedModel(torch.nn.Module):
    """The wrapper of a sharded model. Unlike DDP's it adds nothing: `fully_shard` changes the model in place."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.module = model

    @record_function(SHARDED_FORWARD)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def wrapper_name(wrapped: torch.nn.Module) -> str:
    """Return the class that makes a model distributed: DDP's wrapper, or the class to which FSDP2 changes the model."""
    return type(wrapped.module if isinstance(wrapped, ShardedModel) else wrapped).__name__


class ShardedAdamW(torch.optim.AdamW):
    """AdamW that reads and writes this rank's shards. Its state is sharded like the parameters.

    PyTorch would process `DTensor`s, which takes the host several times as long, and computes the same.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> Any:
        """Fill the lists of tensors of a step: parameters, gradients, moments and numbers of steps."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = local_parts(tensors)
        return has_complex


class FullyShardStrategy:
    """`torch.distributed.fsdp.fully_shard`, as ZeRO-2 or ZeRO-3 (Rajbhandari et al. 2020). Implements `Strategy`.

    The parameters of one transformer block at a time are gathered before its forward pass. ZeRO-3 frees them after it
    and gathers them again for the backward pass; ZeRO-2 keeps them until the backward pass is done. Both keep the
    parameters outside of all blocks.
    """

    shards_optimizer = True

    def __init__(self, settings: Settings, plan: BatchPlan, world: World) -> None:
        self.name: str = settings.strategy
        self.plan, self.world = plan, world
        self.reshard_after_forward, self.cpu_offload = settings.strategy == "zero3", settings.cpu_offload
        self.mixed_precision = MixedPrecisionPolicy()  # gather and reduce parameters in their own dtype
        if settings.param_dtype == "bf16":
            # The gradients of bf16 parameters are in bf16. They are added over micro-batches in fp32.
            self.mixed_precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        # FSDP2's own reduce_dtype would also round the sums over the micro-batches of a logical rank.
        self.reduce_dtype = DTYPES["bf16"] if settings.reduce_dtype == "bf16" else None
        self.logical_ranks: Sequence[int] = plan.logical_ranks_of(world.rank, interleaved=True)
        self.sums = TreeSum()
        self.parameters: list[torch.nn.Parameter] = []
        self.check_gradients = GradientCheck(settings.ddp_find_unused_parameters)
        self.used: set[int] = set()  # parameters that have a gradient of a logical rank other than the last one

    def wrap(self, model: torch.nn.Module) -> ShardedModel:
        """Shard the model's parameters in place, by transformer block. Collective.

        Every rank has the same weights already, so each keeps its own shard of them. `fully_shard` moves the parameters
        and buffers of one block at a time to the device, so the complete model is never there.
        """
        assert isinstance(model, PreTrainedModel)
        # The default process group, with its backend and --ddp_timeout: init_device_mesh may create another one.
        assert dist.group.WORLD is not None
        mesh = DeviceMesh.from_group(dist.group.WORLD, self.world.device.type)
        offload = CPUOffloadPolicy() if self.cpu_offload and self.world.device.type == "cuda" else OffloadPolicy()
        for module in (*transformer_blocks(model), model):
            # The backward pass begins with parameters outside of all blocks, so they would be gathered again at once.
            reshard = self.reshard_after_forward and module is not model
            sharded = fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=reshard,
                mp_policy=self.mixed_precision,
                offload_policy=offload,
            )
            sharded.set_custom_reduce_scatter(PairwiseReduceScatter(self.world.levels, self.reduce_dtype))
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_gradient_divide_factor(1.0)  # PairwiseReduceScatter divides
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return ShardedModel(model)

    def build_optimizer(self, groups: Sequence[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
        return ShardedAdamW(groups, **options)

    def local_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    @contextmanager
    def accumulate(self, wrapped: torch.nn.Module, number: int) -> Iterator[None]:
        """When a logical rank is done, sum its gradients with its neighbors' gradients on the other ranks.

        Every rank keeps its shard of the result.
        """
        assert isinstance(wrapped, ShardedModel)
        assert isinstance(wrapped.module, FSDPModule)
        done = number + 1
        is_last_of_logical_rank = done % self.plan.accumulation_steps == 0
        wrapped.module.set_requires_gradient_sync(is_last_of_logical_rank)
        with record_function(MICRO_BATCH):
            yield
            if done == self.plan.micro_batches_per_step:
                self._add_kept_gradients()
                self.check_gradients(wrapped.module)
            elif is_last_of_logical_rank:
                self._move_gradients_to_sums()

    def _move_gradients_to_sums(self) -> None:
        """Add a logical rank's gradients to the partial sums, and clear them for the next logical rank."""
        self.used |= {i for i, parameter in enumerate(self.parameters) if parameter.grad is not None}
        self.sums.add(self._rounded(local_parts(map(_gradient, self.parameters))))
        for parameter in self.parameters:
            parameter.grad = None

    def _add_kept_gradients(self) -> None:
        """Add the partial sums to the gradients of the last logical rank."""
        if not self.sums.partial_sums and self.reduce_dtype is None:
            return
        for i in self.used:  # a parameter may have a gradient of another logical rank only
            self.parameters[i].grad = _gradient(self.parameters[i])
        with_gradient = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
        gradients = local_parts(with_gradient.values())
        rounded = self._rounded(gradients)
        self.sums.add_to_last_leaf(rounded, list(with_gradient))
        if rounded is not gradients:
            torch._foreach_copy_(gradients, rounded)
        self.sums.clear()
        self.used.clear()

    def _rounded(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Round gradients to `--reduce_dtype`. A sum over the ranks stays as it is: `PairwiseReduceScatter` rounded it.

        With one rank, FSDP2 exchanges nothing, so they are not rounded yet.
        """
        return gradients if self.reduce_dtype is None else [gradient.to(self.reduce_dtype) for gradient in gradients]

    @record_function(CLIP)
    def clip_grad_norm(self, max_norm: float, loss_scale: torch.Tensor) -> torch.Tensor:
        gradients = local_parts(parameter.grad for parameter in self.parameters if parameter.grad is not None)
        total = sum_of_squares(gradients).to(self.world.device)
        dist.all_reduce(total)
        norm = (total.sqrt() / loss_scale).to(self.parameters[0].dtype)
        clip_by_norm(gradients, norm, max_norm, loss_scale=loss_scale)
        return norm

    def gather_model_state(self, model: torch.nn.Module) -> Tensors:
        """Gather one parameter after another, so that only rank 0 holds the complete state dict, on the CPU."""
        state: Tensors = {}
        gathered: dict[int, torch.Tensor] = {}  # tied parameters share a tensor, as in the model's own state dict
        for name, tensor in model.state_dict(keep_vars=True).items():
            # Offloaded parameters are gathered on the GPU, because NCCL cannot send from main memory.
            complete = tensor.detach().to(self.world.device)
            complete = complete.full_tensor() if isinstance(complete, DTensor) else complete
            if self.world.is_main_process:
                state[name] = gathered.setdefault(id(tensor), complete.cpu())
        return state


class PairwiseReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter, as a sum in the order of the tree, divided by the number of ranks.

    With a `dtype`, the gradient of each logical rank is rounded to it, and so is each sum in the tree, as
    `compression.RoundedAllReduce` does.
    """

    def __init__(self, levels: Sequence[RankGroup], dtype: torch.dtype | None = None) -> None:
        self.levels, self.dtype = levels, dtype

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(  # noqa: PLR0917 (the caller's signature)
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's shard of the average of all ranks' inputs into `output_tensor`. Collective."""
        chunks = input_tensor.view(group.size(), -1)
        if self.dtype is None:
            mean = reduce_scatter_pairwise(chunks, self.levels).div_(group.size())
        else:  # divided first, so that what is rounded does not depend on the number of ranks
            mean = reduce_scatter_pairwise(chunks.div_(group.size()).to(self.dtype), self.levels)
        output_tensor.copy_(mean)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient: zeros if it takes no part in the loss."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
