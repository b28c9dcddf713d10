"""Trace the tensors of some optimizer steps (`--trace_tensors FROM:TO`), to find the first one that differs.

Each line of tensors.jsonl is the hash and the norm of one tensor. What identifies it depends on neither the number of
ranks nor the strategy nor the path, so two trainings that should be bitwise identical have the same file:

    step, logical_rank, micro_batch
                    counted from 1, 0 and 0; the last two are null for what all logical ranks share
    phase           name
    forward         of a module, with `[i]` for a tensor of a tuple, in the order in which the modules return
    gradient        of a parameter: what the micro-batch adds to it, in the reverse order of the model's parameters
    summed gradient of a parameter: the mean over the logical ranks before clipping, in the same order
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from .common.errors import AgreedError
from .distributed.collectives import all_gather_object
from .distributed.world import World
from .settings import Settings
from .strategies.base import Strategy, Tensors
from .strategies.optimization import MOMENTS, loss_factor

PHASES = ("forward", "gradient", "summed gradient", "parameter", "moment")
Place = tuple[int, int] | tuple[None, None]  # logical rank and micro-batch
# Where a line is among those of its step (logical rank, micro-batch, phase, position in it), and its items.
Record = tuple[tuple[float, int, int, int], tuple[tuple[str, Any], ...]]


def traced(strategy: Strategy, settings: Settings, step: int, *, world: World) -> Strategy:
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


class TracedStrategy:
    """A strategy that also records tensors. Implements `Strategy`: another one does the work."""

    def __init__(self, strategy: Strategy, steps: range, step: int, *, world: World, precision: str) -> None:
        """
        Args:
            strategy: the one that does the work.
            steps: those to trace.
            step: the next one, counted from 1.
        """
        self.strategy, self.steps, self.step, self.world = strategy, steps, step, world
        self.name, self.plan = strategy.name, strategy.plan
        self.logical_ranks, self.shards_optimizer = strategy.logical_ranks, strategy.shards_optimizer
        # Parts of the gradients that depend on the number of ranks: of a micro-batch's, and of the mean's. They are
        # powers of two, so removing them changes no other bit. In fp16, the loss scale remains.
        self.mean_factor = loss_factor(precision, self.plan)
        self.factor = self.mean_factor / self.plan.logical_ranks_per_rank
        self.records: list[Record] = []

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        # The names before FSDP2 replaces classes and parameters. A tied parameter has one name.
        self.model = model
        self.modules = {module: name or type(model).__name__ for name, module in model.named_modules()}
        first_names = {parameter: name for name, parameter in model.named_parameters()}
        self.names = {
            (module, attribute): first_names[parameter]
            for module in self.modules
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        }
        wrapped = self.strategy.wrap(model)
        self.parameters = dict(model.named_parameters())
        self.positions = {name: position for position, name in enumerate(self.parameters)}
        return wrapped

    def build_optimizer(self, groups: Sequence[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
        return self.strategy.build_optimizer(groups, **options)

    def local_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return self.strategy.local_optimizer(optimizer)

    def gather_model_state(self, model: torch.nn.Module) -> Tensors:
        return self.strategy.gather_model_state(model)

    def accumulate(self, wrapped: torch.nn.Module, number: int) -> AbstractContextManager[Any]:
        context = self.strategy.accumulate(wrapped, number)
        return self._record_micro_batch(context, number) if self.step in self.steps else context

    def clip_grad_norm(self, max_norm: float, loss_scale: torch.Tensor) -> torch.Tensor:
        for name, parameter in self.parameters.items() if self.step in self.steps else ():
            if parameter.grad is not None:
                mean = self._complete(parameter.grad) / self.mean_factor
                self._add("summed gradient", name, mean, position=-self.positions[name])
        return self.strategy.clip_grad_norm(max_norm, loss_scale)

    def end_step(self, optimizer: torch.optim.Optimizer) -> list[Mapping[str, Any]]:
        """Return the lines of tensors.jsonl for a step whose update is done; none if it is not traced. Collective."""
        if self.step not in self.steps:
            self.step += 1
            return []
        state = self.local_optimizer(optimizer).state  # with zero1, of this rank's parameters only
        for name, parameter in self.parameters.items():
            self._add("parameter", name, self._complete(parameter), position=self.positions[name])
            for i, key in enumerate(MOMENTS if parameter in state else ()):
                position = len(MOMENTS) * self.positions[name] + i
                self._add("moment", f"{name}.{key}", self._complete(state[parameter][key]), position=position)
        distinct = {record for of_rank in all_gather_object(self.records, self.world) for record in of_rank}
        self.records, self.step = [], self.step + 1
        return [dict(items) for _, items in sorted(distinct)]

    @contextmanager
    def _record_micro_batch(self, context: AbstractContextManager[Any], number: int) -> Iterator[None]:
        """Add the tensors of the forward and backward passes inside `context`."""
        index, micro_batch = divmod(number, self.plan.accumulation_steps)
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

        with context, ExitStack() as hooks, ExitStack() as forward_hooks:
            for module in self.modules:
                forward_hooks.enter_context(module.register_forward_pre_hook(hook_parameters))
                forward_hooks.enter_context(module.register_forward_hook(add_outputs))
            yield

    def _add_gradient(self, name: str, place: Place, gradient: torch.Tensor) -> None:
        """Add what a backward pass adds to the gradient of a parameter."""
        self._add("gradient", name, gradient / self.factor, place=place, position=-self.positions[name])

    def _complete(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all of a tensor, on every rank. Collective if it is sharded."""
        tensor = tensor.detach().to(self.world.device)  # NCCL cannot send offloaded ones from main memory
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _add(self, phase: str, name: str, tensor: torch.Tensor, *, place: Place = (None, None), position: int) -> None:
        logical_rank, micro_batch = place
        line = {"step": self.step, "logical_rank": logical_rank, "micro_batch": micro_batch, "phase": phase}
        line |= {"name": name, **hash_and_norm(tensor)}
        order = (math.inf if logical_rank is None else logical_rank, micro_batch or 0, PHASES.index(phase), position)
        self.records.append((order, tuple(line.items())))


def hash_and_norm(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the SHA-256 of dtype, shape and bytes, 16 digits, and the 2-norm, in fp64; None if it is not finite."""
    values = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{values.dtype} {tuple(values.shape)} ".encode())
    digest.update(values.view(-1).view(torch.uint8).numpy().data)
    # NumPy adds with one thread, so the sum does not depend on the number of threads.
    norm = math.sqrt(np.square(values.double().numpy()).sum())
    return {"hash": digest.hexdigest()[:16], "norm": norm if math.isfinite(norm) else None}
