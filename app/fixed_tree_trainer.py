"""The fixed tree in a subclass of `transformers.Trainer`; docs/your_own_loop.md explains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer

from .fixed_tree import FixedTree, FixedTreeSampler, plan_of


class FixedTreeTrainerMixin(Trainer):
    """`class MyTrainer(FixedTreeTrainerMixin, Trainer): logical_ranks = 8` trains on the fixed tree.

    A step has `per_device_train_batch_size` rows for each logical rank. How many micro-batches a process accumulates
    follows from the number of processes.
    """

    logical_ranks = 0  # to be set in your class, as for `FixedTree`
    threads: int | None = None
    trace_steps: tuple[int, int] | None = None  # the first and the last step for tensors.jsonl in `output_dir`
    tree: Any = None  # a FixedTree, from the first step on

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        n = plan_of(self.logical_ranks, self.logical_ranks, self.logical_ranks)[0].logical_ranks_per_rank
        own = self.args
        accumulates = own.gradient_accumulation_steps not in (1, n)
        if accumulates or own.n_gpu > 1 or own.fp16 or not own.average_tokens_across_devices:
            problem = "raise logical_ranks, not gradient_accumulation_steps; start several GPUs with torchrun; use bf16"
            raise ValueError(f"FixedTreeTrainerMixin: {problem}, not fp16; keep average_tokens_across_devices=True")
        own.gradient_accumulation_steps = n

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return Trainer's loader with a `FixedTreeSampler`: accelerate would divide the rows by processes."""
        loader: Any = super().get_train_dataloader()
        rows = self.args.train_batch_size * self.logical_ranks
        sampler = FixedTreeSampler(loader.dataset, rows, self.logical_ranks, seed=self.args.seed)
        names = ("collate_fn", "num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "worker_init_fn")
        new: Any = DataLoader(loader.dataset, batch_sampler=sampler, **{name: getattr(loader, name) for name in names})
        new.set_epoch = sampler.set_epoch  # Trainer calls it
        return new  # type: ignore[no-any-return]

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on a micro-batch of the next logical rank. Trainer divides the loss by their number."""
        if self.tree is None or self.tree.wrapped is not model:
            self.tree = FixedTree(model, self.logical_ranks, threads=self.threads, divides=False)
            if self.trace_steps:
                self.tree.trace_tensors(Path(self.args.output_dir or ".", "tensors.jsonl"), *self.trace_steps)
        logical_rank = self.tree.logical_ranks[self.tree.done % len(self.tree.logical_ranks)]
        with self.tree.micro_batch(self.state.global_step, logical_rank, seed=self.args.seed):
            return super().training_step(model, *args, **kwargs)

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        return self.tree.clip_grad_norm_(self.args.max_grad_norm)  # type: ignore[no-any-return]
