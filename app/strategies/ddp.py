"""Distributed data parallel: every rank holds the complete model, and gradients are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ..data.batches import BatchPlan
from ..distributed.collectives import saved_buffers
from ..distributed.world import World
from ..settings import Settings
from .base import GradientTree, Tensors, add_gradients_per_block
from .optimization import loss_factor
from .reduction import FixedOrderAllReduce


class DDPStrategy:
    """`torch.nn.parallel.DistributedDataParallel` (Li et al. 2020, "PyTorch Distributed"). Implements `Strategy`."""

    name: str = "ddp"
    shards_optimizer = False

    def __init__(self, settings: Settings, plan: BatchPlan, world: World) -> None:
        self.settings, self.plan, self.world = settings, plan, world
        self.bucket_cap_mb: float | None = settings.ddp_bucket_cap_mb
        self.logical_ranks: Sequence[int] = plan.logical_ranks_of(world.rank)
        self.tree: GradientTree  # from `wrap` on

    def wrap(self, model: torch.nn.Module) -> DistributedDataParallel:
        """Copy rank 0's weights to all ranks, and hook into backward() to average the gradients. Collective."""
        model.to(self.world.device)
        if isinstance(model, PreTrainedModel):
            add_gradients_per_block(model)
        # Without this, DDP would broadcast constants such as position ids in every step.
        constants = dict(model.named_buffers()).keys() - saved_buffers(model).keys()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, constants)
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.world.device.index] if self.world.device.type == "cuda" else None,
            find_unused_parameters=self.settings.ddp_find_unused_parameters,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=True,  # otherwise each gradient is in memory twice
        )
        self.tree = GradientTree(wrapped, self.plan, allow_unused=self.settings.ddp_find_unused_parameters)
        settings, plan, hook = self.settings, self.plan, self.settings.ddp_comm_hook
        if hook != "no":  # even with one process, so that the results are the same
            from .compression import HOOK_DTYPES, RoundedAllReduce, register_power_sgd  # other runs do not need it

            if hook == "power_sgd":
                register_power_sgd(wrapped, self.world, total_steps=plan.total_steps, seed=settings.seed)
                return wrapped
            dtype, factor = HOOK_DTYPES[hook], loss_factor(settings.precision, plan)
            parameters, sums = self.tree.parameters, self.tree.sums
            self.tree.register(RoundedAllReduce(parameters, sums, world=self.world, dtype=dtype, factor=factor))
        elif self.world.size > 2 or plan.logical_ranks_per_rank > 1:
            self.fix_order()  # otherwise DDP's own all-reduce is the tree, because a + b = b + a
        return wrapped

    def fix_order(self) -> None:
        """Add gradients in the order of the tree. Measurements of DDP's own all-reduce override this."""
        levels, device = self.world.levels, self.world.device
        self.tree.register(FixedOrderAllReduce(self.tree.parameters, self.tree.sums, levels=levels, device=device))

    def build_optimizer(self, groups: Sequence[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, **options)

    def local_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def accumulate(self, wrapped: torch.nn.Module, number: int) -> AbstractContextManager[Any]:
        return self.tree.accumulate(number)

    def clip_grad_norm(self, max_norm: float, loss_scale: torch.Tensor) -> torch.Tensor:
        return self.tree.clip_grad_norm(max_norm, loss_scale)

    def gather_model_state(self, model: torch.nn.Module) -> Tensors:
        return dict(model.state_dict()) if self.world.is_main_process else {}


class Zero1Strategy(DDPStrategy):
    """DDP, with the optimizer's state sharded by parameter (ZeRO-1; Rajbhandari et al. 2020). Implements `Strategy`.

    Each rank updates its own parameters and broadcasts them to the others.
    """

    name = "zero1"
    shards_optimizer = True

    def build_optimizer(self, groups: Sequence[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes 0.2 s, which the other strategies save

        return ZeroRedundancyOptimizer(
            [dict(group) for group in groups],
            optimizer_class=torch.optim.AdamW,
            # Broadcast each rank's parameters at once. They become views of one tensor without gaps. GPU kernels are
            # chosen by alignment: the views begin at multiples of 16 bytes, as separate tensors do, unless a parameter
            # before them has a number of elements that 4 does not divide. The layout is not configurable.
            parameters_as_bucket_view=True,
            **options,
        )

    def local_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        local: torch.optim.Optimizer = optimizer.optim  # type: ignore[attr-defined]
        return local
