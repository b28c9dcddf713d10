"""Distributed data parallel: every rank holds the complete model, and gradients are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from transformers import PreTrainedModel

from ..data.sampler import BatchPlan
from ..distributed.collectives import saved_buffers
from ..distributed.world import World
from ..settings import Settings
from .base import (
    CLIP,
    MICRO_BATCH,
    GradientCheck,
    Tensors,
    add_gradients_per_block,
    clip_by_norm,
    sum_of_squares,
)
from .optimization import loss_factor
from .reduction import FixedOrderAllReduce, TreeSum


class DDPStrategy:
    """`torch.nn.parallel.DistributedDataParallel` (Li et al. 2020, "PyTorch Distributed"). Implements `Strategy`."""

    name: str = "ddp"
    shards_optimizer = False

    def __init__(self, settings: Settings, plan: BatchPlan, world: World) -> None:
        self.settings, self.plan, self.world = settings, plan, world
        self.bucket_cap_mb: float | None = settings.ddp_bucket_cap_mb
        self.logical_ranks: Sequence[int] = plan.logical_ranks_of(world.rank)
        self.sums = TreeSum()
        self.parameters: list[torch.nn.Parameter] = []
        self.fixed_order: FixedOrderAllReduce | None = None
        self.check_gradients = GradientCheck(settings.ddp_find_unused_parameters)

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
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        settings, plan, hook = self.settings, self.plan, self.settings.ddp_comm_hook
        if hook != "no":  # even with one process, so that the results are the same
            from .compression import HOOK_DTYPES, RoundedAllReduce, register_power_sgd  # other runs do not need it

            if hook == "power_sgd":
                register_power_sgd(wrapped, self.world, total_steps=plan.total_steps, seed=settings.seed)
                return wrapped
            dtype, factor = HOOK_DTYPES[hook], loss_factor(settings.precision, plan)
            self.fixed_order = RoundedAllReduce(
                self.parameters, self.sums, world=self.world, dtype=dtype, factor=factor
            )
        elif self.world.size > 2 or plan.logical_ranks_per_rank > 1:
            self.fix_order()  # otherwise DDP's own all-reduce is the tree, because a + b = b + a
        if self.fixed_order:
            wrapped.register_comm_hook(self.fixed_order, lambda hook, bucket: hook.average(bucket))
        return wrapped

    def fix_order(self) -> None:
        """Add gradients in the order of the tree. Measurements of DDP's own all-reduce override this."""
        self.fixed_order = FixedOrderAllReduce(self.parameters, self.sums, self.world)

    def build_optimizer(self, groups: Sequence[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, **options)

    def local_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    @contextmanager
    def accumulate(self, wrapped: torch.nn.Module, number: int) -> Iterator[None]:
        """Keep the gradients local, except for the last micro-batch of a step: its backward() averages their sum."""
        assert isinstance(wrapped, DistributedDataParallel)
        done = number + 1
        is_last = done == self.plan.micro_batches_per_step
        context: AbstractContextManager[Any] = nullcontext() if is_last else wrapped.no_sync()
        with record_function(MICRO_BATCH):
            with context:
                yield
            if is_last:
                # DDP itself raises only in the next forward pass, after a step with gradients that were not averaged.
                self.check_gradients(wrapped.module)
                self.sums.clear()
            elif done % self.plan.accumulation_steps == 0:  # the last of a logical rank, but not of the step
                self._move_gradients_to_sums()

    def _move_gradients_to_sums(self) -> None:
        """Add a logical rank's gradients to the partial sums, and clear them for the next logical rank."""
        assert self.fixed_order is not None
        self.fixed_order.add([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        for parameter in self.parameters:
            # If DDP searches for unused parameters, it expects a gradient of those that it has seen before.
            keep = self.settings.ddp_find_unused_parameters and parameter.grad is not None
            parameter.grad = torch.zeros_like(parameter) if keep else None

    @record_function(CLIP)
    def clip_grad_norm(self, max_norm: float, loss_scale: torch.Tensor) -> torch.Tensor:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = (sum_of_squares(gradients).sqrt() / loss_scale).to(self.parameters[0].dtype)
        clip_by_norm(gradients, norm, max_norm, loss_scale=loss_scale)
        return norm

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
