"""Trace the tensors of some optimizer steps (`--trace_tensors FROM:TO`), to find the first one that differs.

Each line of tensors.jsonl is the hash and the norm of one tensor. What identifies it depends on neither the number of
ranks nor the strategy nor the path, so two trainings that should be bitwise identical have the same file:

    step, logical_rank, micro_batch
                    counted from 1, 0 and 0; the last two are null for what all logical ranks share
    phase           name
    forward         of a module, with `[i]` for a tensor of a tuple, in the order in which the modules return
    gradient        of a parameter: what the micro-batch adds to it, in the reverse order of the model's parameters
    summed gradient of a parameter: the mean over the logical ranks before clipping, in the same order
    buffer          after the last micro-batch; only `FixedTree.trace_tensors` has them
    parameter       after the update, in the order of the model
    moment          after the update: `<parameter>.exp_avg` and `<parameter>.exp_avg_sq`

If ranks hold different values of a shared tensor, each value has a line.

The tensors come from hooks of modules and parameters, which exist only in a micro-batch of a traced step.
`torch.utils._debug_mode.DebugMode` would also see what happens inside a module, but it logs operators: DDP and FSDP2
run different ones, a gradient or a moment is no operator's output by name, and a hash of DebugMode is a norm or an XOR
of all elements, which do not notice elements that have changed places. It is not a public interface, either.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from .common.errors import AgreedError
from .distributed.world import World
from .settings import Settings
from .strategies.base import Strategy
from .strategies.optimization import loss_factor

PHASES = ("forward", "gradient", "summed gradient", "buffer", "parameter", "moment")
Place = tuple[int, int] | tuple[None, None]  # logical rank and micro-batch
# Where a line is among those of its step (logical rank, micro-batch, phase, position in it), and its items.
Record = tuple[tuple[float, int, int, int], tuple[tuple[str, Any], ...]]


def traced(strategy: Strategy, settings: Settings, step: int, *, world: World) -> Any:
    """Return the strategy; with `--trace_tensors`, one that also records its tensors.

    Args:
        step: the number of optimizer steps before this process was started.

    Raises:
        AgreedError: the run ends before the first step to trace.
    """
    if settings.trace_tensors is None:
        return strategy
    first, last = map(int, settings.trace_tensors.split(":"))
    if first > (total := strategy.plan.total_steps):
        raise AgreedError(f"--trace_tensors {settings.trace_tensors}: the run ends after step {total}")
    return TracedStrategy(strategy, range(first, last + 1), step + 1, world=world, precision=settings.precision)


class TensorTrace:
    """Records the tensors of some steps. `TracedStrategy` and `app.fixed_tree.FixedTree` call it."""

    def __init__(
        self,
        steps: range,
        logical_ranks: Sequence[int],
        accumulation_steps: int,
        *,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        step: int = 1,
    ) -> None:
        """
        Args:
            steps: those to trace.
            logical_ranks: those of this process.
            group: of all processes, for objects.
            step: the next one, counted from 1.
        """
        self.steps, self.step, self.device, self.group = steps, step, device, group
        self.logical_ranks, self.accumulation_steps = logical_ranks, accumulation_steps
        # Parts of the gradients that depend on the number of ranks: of a micro-batch's, and of the mean's. They are
        # powers of two, so removing them changes no other bit. In fp16, the loss scale remains.
        self.factor = self.mean_factor = 1.0
        self.records: list[Record] = []

    def name_tensors(self, model: torch.nn.Module) -> None:
        """Keep the names before FSDP2 replaces classes and parameters. A tied parameter has one name."""
        self.model = model
        self.modules = {module: name or type(model).__name__ for name, module in model.named_modules()}
        first_names = {parameter: name for name, parameter in model.named_parameters()}
        self.positions = {name: position for position, name in enumerate(first_names.values())}
        self.names = {
            (module, attribute): first_names[parameter]
            for module in self.modules
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        }

    def add_mean_gradients(self) -> None:
        """Add the mean gradients over the logical ranks, before they are clipped. Collective."""
        for name, parameter in self.model.named_parameters() if self.step in self.steps else ():
            if parameter.grad is not None:
                mean = self._complete(parameter.grad) / self.mean_factor
                self._add("summed gradient", name, mean, position=-self.positions[name])

    def add_buffers(self) -> None:
        """Add the buffers, such as BatchNorm's statistics."""
        for position, (name, buffer) in enumerate(self.model.named_buffers() if self.step in self.steps else ()):
            self._add("buffer", name, buffer, position=position)

    def add_update(
        self, optimizer: torch.optim.Optimizer, updated: Container[torch.Tensor] | None = None
    ) -> list[Mapping[str, Any]]:
        """Return the lines of tensors.jsonl for a step whose update is done; none if it is not traced. Collective.

        Args:
            updated: the parameters that have been updated; None: all.
        """
        if self.step not in self.steps:
            return []
        for name, parameter in self.model.named_parameters():
            if updated is not None and parameter not in updated:
                continue
            self._add("parameter", name, self._complete(parameter), position=self.positions[name])
            state = optimizer.state.get(parameter, {})  # with zero1, of this rank's parameters only
            moments = [key for key, value in state.items() if getattr(value, "shape", None) == parameter.shape]
            for i, key in enumerate(moments):
                position = len(moments) * self.positions[name] + i
                self._add("moment", f"{name}.{key}", self._complete(state[key]), position=position)
        records = [self.records]
        if dist.is_initialized():
            records *= dist.get_world_size(self.group)
            dist.all_gather_object(records, self.records, group=self.group)
        distinct, self.records = {*chain.from_iterable(records)}, []
        return [dict(items) for _, items in sorted(distinct)]

    @contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        """Add the tensors of the passes in this block: those of micro-batch `number` of a step, counted from 0."""
        if self.step not in self.steps:
            yield
            return
        index, micro_batch = divmod(number, self.accumulation_steps)
        place = (self.logical_ranks[index], micro_batch)
        calls: Counter[str] = Counter()
        hooked: set[torch.Tensor] = set()

        def add_outputs(module: torch.nn.Module, _: Any, output: Any) -> None:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            for i, tensor in enumerate(tensors):
                name = self.modules[module] + ("" if tensor is output else f"[{i}]")
                calls[name] += 1
                name += f" (call {calls[name]})" if calls[name] > 1 else ""
                self._add("forward", name, tensor, place=place, position=calls.total())
            if module is self.model:  # --activation_checkpointing repeats parts of the forward pass after its end
                forward_hooks.close()

        def hook_parameters(module: torch.nn.Module, _: Any) -> None:
            # FSDP2 gathers the parameters of a block right before its forward pass, into tensors of their own.
            for submodule in module.modules():
                for attribute, parameter in submodule.named_parameters(recurse=False, remove_duplicate=False):
                    if parameter.requires_grad and not isinstance(parameter, DTensor) and parameter not in hooked:
                        hooked.add(parameter)
                        add = partial(self._add_gradient, self.names[submodule, attribute], place)
                        hooks.enter_context(parameter.register_hook(add))

        with ExitStack() as hooks, ExitStack() as forward_hooks:
            for module in self.modules:
                forward_hooks.enter_context(module.register_forward_pre_hook(hook_parameters))
                forward_hooks.enter_context(module.register_forward_hook(add_outputs))
            yield

    def _add_gradient(self, name: str, place: Place, gradient: torch.Tensor) -> None:
        """Add what a backward pass adds to the gradient of a parameter."""
        self._add("gradient", name, gradient / self.factor, place=place, position=-self.positions[name])

    def _complete(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all of a tensor, on every rank. Collective if it is sharded."""
        tensor = tensor.detach().to(self.device)  # NCCL cannot send offloaded ones from main memory
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _add(self, phase: str, name: str, tensor: torch.Tensor, *, place: Place = (None, None), position: int) -> None:
        logical_rank, micro_batch = place
        line = {"step": self.step, "logical_rank": logical_rank, "micro_batch": micro_batch, "phase": phase}
        line |= {"name": name, **hash_and_norm(tensor)}
        order = (math.inf if logical_rank is None else logical_rank, micro_batch or 0, PHASES.index(phase), position)
        self.records.append((order, tuple(line.items())))


class TracedStrategy(TensorTrace):
    """A strategy that also records tensors. Its other attributes are those of `strategy`."""

    def __init__(self, strategy: Strategy, steps: range, step: int, *, world: World, precision: str) -> None:
        self.strategy, plan = strategy, strategy.plan
        place: Any = {"device": world.device, "group": world.control_group, "step": step}
        super().__init__(steps, strategy.logical_ranks, plan.accumulation_steps, **place)
        self.mean_factor = loss_factor(precision, plan)
        self.factor = self.mean_factor / plan.logical_ranks_per_rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self.strategy, name)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        self.name_tensors(model)
        return self.strategy.wrap(model)

    @contextmanager
    def accumulate(self, wrapped: torch.nn.Module, number: int) -> Iterator[None]:
        with self.strategy.accumulate(wrapped, number), self.micro_batch(number):
            yield

    def clip_grad_norm(self, max_norm: float, loss_scale: torch.Tensor) -> torch.Tensor:
        self.add_mean_gradients()
        return self.strategy.clip_grad_norm(max_norm, loss_scale)

    def end_step(self, optimizer: torch.optim.Optimizer) -> list[Mapping[str, Any]]:
        """See `add_update`. Collective."""
        lines = self.add_update(self.strategy.local_optimizer(optimizer))
        self.step += 1
        return lines


def hash_and_norm(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the SHA-256 of dtype, shape and bytes, 16 digits, and the 2-norm, in fp64; None if it is not finite."""
    values = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{values.dtype} {tuple(values.shape)} ".encode())
    digest.update(values.view(-1).view(torch.uint8).numpy().data)
    # NumPy adds with one thread, so the sum does not depend on the number of threads.
    norm = math.sqrt(np.square((values.abs() if values.is_complex() else values).double().numpy()).sum())
    return {"hash": digest.hexdigest()[:16], "norm": norm if math.isfinite(norm) else None}
