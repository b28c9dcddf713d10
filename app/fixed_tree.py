"""The fixed tree in a training loop of your own: the same weights, bit for bit, with 1, 2, 4 or more processes.

docs/your_own_loop.md explains it, and docs/examples/ has a plain loop, one with accelerate and one with Trainer. The
strategies of this application use the same classes: `GradientTree`, `FixedOrderAllReduce` and `FullBatchSampler`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
import weakref
from collections.abc import Iterator, Sized
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from .data.batches import BatchPlan, FullBatchSampler, plan_batches
from .distributed.collectives import all_gather_single
from .distributed.environment import default_threads
from .distributed.world import RankGroup
from .model.dropout import seed_generators
from .settings import Settings
from .strategies.base import GradientTree
from .strategies.reduction import FixedOrderAllReduce, TreeSum, sum_pairwise
from .tracing import TensorTrace


def plan_of(logical_ranks: int, batch_size: int, n_rows: int) -> tuple[BatchPlan, int]:
    """Divide the rows of a step, and return the rank of this process as well."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if (expected := int(os.environ.get("WORLD_SIZE", size))) != size:
        raise RuntimeError(f"WORLD_SIZE is {expected}: call torch.distributed.init_process_group first")
    if logical_ranks < 1 or logical_ranks & (logical_ranks - 1) or logical_ranks % size:
        problem = "pass a power of two, such as 8, and start that many processes or a half, a quarter, … of them"
        raise ValueError(f"logical_ranks={logical_ranks} with {size} process(es): {problem}")
    if batch_size % logical_ranks or not 0 < batch_size <= n_rows:
        problem = f"a multiple of logical_ranks={logical_ranks} and at most the {n_rows} rows of the dataset"
        raise ValueError(f"batch_size={batch_size}: pass the rows of a step on all processes together, {problem}")
    return plan_batches(Settings(train_batch_size=batch_size, logical_ranks=logical_ranks), n_rows, size), rank


class FixedTreeSampler(FullBatchSampler):
    """A batch sampler: `DataLoader(dataset, batch_sampler=FixedTreeSampler(dataset, 64, logical_ranks=8))`.

    `batch_size` counts the rows of a step on all processes. The sampler yields the rows of this process's logical ranks
    one after another. Each epoch leaves out the rows that fill no batch. Call `set_epoch(epoch)` before each of them.
    """

    def __init__(self, dataset: Sized, batch_size: int, logical_ranks: int, *, seed: int = 42) -> None:
        plan, rank = plan_of(logical_ranks, batch_size, len(dataset))
        lengths = np.zeros(len(dataset), dtype=np.int64)  # rows are not grouped by them
        super().__init__(lengths, plan, logical_ranks=plan.logical_ranks_of(rank), seed=seed)
        self.steps_per_epoch = plan.steps_per_epoch

    def __len__(self) -> int:
        """Return the number of this process's micro-batches in an epoch."""
        return self.steps_per_epoch * len(self.logical_ranks)

    def __iter__(self) -> Iterator[Any]:
        if self.steps_done >= self.steps_per_epoch:
            raise ValueError(f"set_epoch: steps_done counts steps of this epoch, which has {self.steps_per_epoch}")
        return iter(self.epoch_rows()[self.steps_done :].reshape(-1, self.plan.micro_size).tolist())


class FixedTree(GradientTree):
    """Average gradients over a fixed number of logical ranks, whatever the number of processes that work for them.

    Each logical rank trains on an equal share of the batch. Its random numbers follow from the step and the logical
    rank. The gradients of all logical ranks are added in one order, and so are buffers such as BatchNorm's statistics.
    """

    def __init__(
        self, model: torch.nn.Module, logical_ranks: int, *, threads: int | None = None, divides: bool = True
    ) -> None:
        """Register DDP's communication hook. Collective.

        Args:
            model: a `DistributedDataParallel`; if there is one process, any module.
            logical_ranks: the largest number of processes that you expect to use, a power of two.
            threads: for `torch.set_num_threads`, because the number of CPU threads affects rounding. By default, for a
                model on a CPU, the cores of the node divided by `logical_ranks`.
            divides: whether to divide by the number of this process's logical ranks; False: the loss is divided.
        """
        plan, rank = plan_of(logical_ranks, logical_ranks, logical_ranks)
        if plan.ranks > 1 and not isinstance(model, DistributedDataParallel):
            problem = f"pass DistributedDataParallel(model), not {type(model).__name__}; compile the model before"
            raise TypeError(f"FixedTree: {problem}")
        if any(isinstance(module, SyncBatchNorm) or getattr(module, "sparse", False) for module in model.modules()):
            raise TypeError("FixedTree: use BatchNorm or GroupNorm, not SyncBatchNorm; embeddings with sparse=False")
        super().__init__(model, plan, allow_unused=getattr(model, "find_unused_parameters", True))
        self.logical_ranks, self.device = plan.logical_ranks_of(rank), self.parameters[0].device  # of this process
        self.step, self.done = -1, len(self.logical_ranks)  # the last step, and how many of its micro-batches are done
        self.updates = 1  # how often an optimizer has changed these parameters since the step began
        weakref.finalize(self, register_optimizer_step_post_hook(partial(count_update, weakref.ref(self))).remove)
        # Such as BatchNorm's statistics. Each logical rank updates those of the step before. Integers are not averaged.
        self.buffers, self.buffer_sums = list(model.buffers()), TreeSum()
        self.averaged = [buffer for buffer in self.buffers if buffer.is_floating_point()]
        self.buffers_before: list[torch.Tensor] = []
        self.after_step = list[int](), torch.empty(0)  # how often PyTorch had written to buffers, and their values
        if threads or self.device.type == "cpu":
            torch.set_num_threads(threads or default_threads(logical_ranks))
        self.divisor = plan.logical_ranks_per_rank if divides else 1
        self.trace = TensorTrace(range(0), self.logical_ranks, 1, device=self.device)
        if isinstance(model, DistributedDataParallel):
            model.broadcast_buffers = False  # a second forward pass in a micro-batch would begin with those of rank 0
            if model.static_graph or model.process_group is not dist.group.WORLD:
                raise ValueError("FixedTree: create DistributedDataParallel without static_graph and process_group")
            given: list[Any] = [None] * plan.ranks
            dist.all_gather_object(given, {"logical_ranks": logical_ranks, "threads": torch.get_num_threads()})
            if any(values != given[0] for values in given):
                raise ValueError(f"FixedTree: the processes have {given}: pass the same values to all of them")
            levels = [RankGroup(None, plan.ranks, rank)]  # all processes at once, also those of several nodes
            all_reduce = FixedOrderAllReduce(self.parameters, self.sums, levels=levels, device=self.device)
            all_reduce.divisor = self.divisor
            self.register(all_reduce)
            # Released after DDP's reducer, which would wait for gloo's threads without releasing the GIL: a deadlock.
            object.__setattr__(model, "group_of_fixed_tree", model.process_group)

    def trace_tensors(self, file: str | Path, first: int, last: int) -> None:
        """Write hashes and norms of the tensors of these steps, counted from 1, to a file (see app/tracing.py).

        Call it on every process, before the first of these steps. `samebits diff` compares two such files.
        """
        if not 1 <= first <= last:
            raise ValueError(f"trace_tensors({first}, {last}): pass two steps; step 1 is micro_batch(step=0)")
        self.trace.steps, self.trace_file = range(first, last + 1), Path(file)
        self.trace_file.parent.mkdir(parents=True, exist_ok=True)
        self.trace_file.unlink(missing_ok=True)
        self.trace.name_tensors(getattr(self.wrapped, "module", self.wrapped))
        self.trace.factor = self.divisor / len(self.logical_ranks)  # of a loss that is divided by their number

    @contextmanager
    def micro_batch(self, step: int, logical_rank: int, *, seed: int = 42) -> Iterator[None]:
        """A context for the forward and backward passes of each logical rank in `self.logical_ranks`. Collective.

        backward() gets the mean loss of the rows: the tree divides by the number of logical ranks. The gradients are
        cleared when the first context of a step begins, and averaged when the last one ends. Inside, the random numbers
        of PyTorch, NumPy and Python follow from the arguments. `step` counts the optimizer steps before this one.
        """
        number = self.done % len(self.logical_ranks)
        if logical_rank != self.logical_ranks[number] or (step == self.step) != (number > 0):
            due = f"logical rank {self.logical_ranks[number]} of {f'step {self.step}' if number else 'another step'}"
            problem = f"{due} is next: count steps over all epochs, and in each one loop over tree.logical_ranks"
            raise ValueError(f"micro_batch(step={step}, logical_rank={logical_rank}): {problem}")
        if number > 0 and self.updates:
            raise RuntimeError("micro_batch: call optimizer.step() after the loop over tree.logical_ranks")
        if number == 0:
            if not self.updates:
                problem = f"the gradients of step {self.step} were not used: for larger batches, raise logical_ranks"
                warnings.warn(f"FixedTree: no optimizer.step() since then: {problem}", stacklevel=3)
            accelerate = sys.modules.get("accelerate.state")
            if accelerate and accelerate.GradientState().num_steps != 1:  # the same object for all Accelerators
                raise ValueError("micro_batch: accelerator.backward() would divide: remove gradient_accumulation_steps")
            self.wrapped.zero_grad()  # otherwise backward() would add to the gradients of the step before
            versions, values = self.after_step  # to compare values, the host has to wait for a GPU
            if versions and versions != self._versions() and not torch.equal(self._flat_buffers(), values):
                problem = "after a forward pass in train() mode, weights depend on the number of processes: use eval()"
                warnings.warn(f"FixedTree: BatchNorm's or other buffers changed elsewhere: {problem}", stacklevel=3)
            self.step, self.trace.step = step, step + 1
            self.updates, self.buffers_before = 0, [buffer.clone() for buffer in self.buffers]
        for buffer, before in zip(self.buffers, self.buffers_before, strict=True):
            buffer.copy_(before)
        with ExitStack() as stack:  # outside of it, nothing must follow from these seeds
            stack.callback(random.setstate, random.getstate())
            stack.callback(np.random.set_state, np.random.get_state())
            devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
            stack.enter_context(torch.random.fork_rng(devices))
            stack.enter_context(self.accumulate(number))
            stack.enter_context(self.trace.micro_batch(number))
            seed_generators(seed, step, logical_rank)
            counted: set[torch.Tensor] = set()
            for parameter in (parameter for parameter in self.parameters if parameter.requires_grad):
                stack.callback(parameter.register_post_accumulate_grad_hook(partial(count_gradient, counted)).remove)
            yield
            if not counted:
                raise RuntimeError("micro_batch: call backward() inside it, also on the loss of the last logical rank")
            if (missing := {*self.parameters} - counted) and not self.allow_unused:
                name = next(name for name, x in self.wrapped.named_parameters() if x in missing)
                problem = "pass find_unused_parameters=True to DistributedDataParallel, or first requires_grad_(False)"
                raise ValueError(f"{name.removeprefix('module.')} has no gradient in micro_batch: {problem}")
        if self.averaged:
            self._add_buffers(is_last=number + 1 == len(self.logical_ranks))
        self.done = number + 1

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Do what `torch.nn.utils.clip_grad_norm_` does, with squares that are added in fp64."""
        if missing := self.logical_ranks[0 if self.updates else self.done :]:
            raise RuntimeError(f"clip_grad_norm_: first train on logical rank(s) {missing}")
        return self.clip_grad_norm(max_norm, torch.ones((), device=self.device))

    def _finish(self) -> None:
        super()._finish()
        if self.all_reduce is None:
            torch._foreach_div_([p.grad for p in self.parameters if p.grad is not None], self.divisor)
        else:
            exchanges, self.all_reduce.exchanges = self.all_reduce.exchanges, 0
            if exchanges != 1:
                problem = "not once: call the DistributedDataParallel itself, and outside of micro_batch in no_grad()"
                raise RuntimeError(f"micro_batch: backward() exchanged gradients {exchanges} times, {problem}")
        self.trace.add_mean_gradients()

    def _add_buffers(self, is_last: bool) -> None:
        """Make each floating-point buffer the mean over the logical ranks; DDP would keep that of rank 0."""
        # Divided before they are added: a constant such as torch.finfo(torch.float32).min must stay the same.
        total = self._flat_buffers().div_(self.plan.logical_ranks)
        if not is_last:
            return self.buffer_sums.add([total])
        self.buffer_sums.add_to_last_leaf([total], [0])
        self.buffer_sums.clear()
        if self.plan.ranks > 1:
            sums = total.new_empty(self.plan.ranks, len(total))
            all_gather_single(sums.view(-1), total)
            total = sum_pairwise(sums)
        for buffer, mean in zip(self.averaged, total.split([x.numel() for x in self.averaged]), strict=True):
            buffer.copy_(mean.view_as(buffer))
        self.trace.add_buffers()
        self.after_step = self._versions(), self._flat_buffers()

    def _versions(self) -> list[int]:
        return [buffer._version for buffer in self.buffers]  # of BatchNorm's, only the counter's changes

    def _flat_buffers(self) -> torch.Tensor:
        return torch.cat([buffer.flatten() for buffer in self.averaged])


def count_update(tree: weakref.ref[FixedTree], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if (own := tree()) is not None and not updated.isdisjoint(own.parameters):
        own.updates += 1
        lines = own.trace.add_update(optimizer, updated)
        if lines and 0 in own.logical_ranks:
            with own.trace_file.open("a") as file:
                file.writelines(f"{json.dumps(line)}\n" for line in lines)


def count_gradient(counted: set[torch.Tensor], parameter: torch.Tensor) -> None:
    """Raise RuntimeError if backward() has added to a gradient twice, which DDP would not always exchange."""
    if parameter in counted:
        raise RuntimeError("micro_batch: call backward() once inside it: add the losses first")
    counted.add(parameter)
