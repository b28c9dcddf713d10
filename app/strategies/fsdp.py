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
from ..data.batches import BatchPlan
from ..distributed.world import RankGroup, World
from ..settings import Settings
from .base import SHARDED_FORWARD, GradientTree, Tensors, local_parts, transformer_blocks
from .reduction import reduce_scatter_pairwise


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
        self.allow_unused = settings.ddp_find_unused_parameters
        self.tree: GradientTree  # from `wrap` on

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
        wrapped = ShardedModel(model)
        self.tree = GradientTree(wrapped, self.plan, allow_unused=self.allow_unused, dtype=self.reduce_dtype)
        return wrapped

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
        wrapped.module.set_requires_gradient_sync((number + 1) % self.plan.accumulation_steps == 0)
        with self.tree.accumulate(number):
            yield

    def clip_grad_norm(self, max_norm: float, loss_scale: torch.Tensor) -> torch.Tensor:
        return self.tree.clip_grad_norm(max_norm, loss_scale, sharded=True)

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
