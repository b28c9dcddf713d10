"""What the benchmarks share: a model on all ranks, its rows, and rounds of training steps with their time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from app.data.csv_table import ReviewTable
from app.data.loaders import Collator, train_loader
from app.data.sampler import BatchPlan
from app.data.split import Split
from app.data.tokenize import lengths_of, tokenize
from app.distributed.collectives import reduce_mean
from app.distributed.world import World
from app.model.load import load_classifier, load_tokenizer
from app.settings import Settings
from app.training.console import quiet_libraries
from app.training.prepare import read_and_split


@dataclass(frozen=True)
class Bench:
    """`loader` deals this rank's batches by the default recipe."""

    table: ReviewTable
    split: Split
    plan: BatchPlan
    tokenizer: PreTrainedTokenizerBase
    ddp: DistributedDataParallel
    loader: DataLoader[Any]


def set_up(settings: Settings, world: World) -> Bench:
    quiet_libraries(world)
    table, split, plan = read_and_split(settings, world.size)
    tokenizer = load_tokenizer(settings, table.texts.iloc[split.train])
    rows = tokenize(table, tokenizer, settings.max_length, Path(settings.cache_dir), world)
    model = load_classifier(settings, table.class_names, tokenizer).model.to(device=world.device)  # type: ignore[call-arg]
    train = rows.remove_columns("length").select(split.train)
    loader = train_loader(train, lengths_of(rows)[split.train], Collator(tokenizer), plan, world, settings)
    return Bench(table, split, plan, tokenizer, DistributedDataParallel(model), loader)


def train_steps(
    ddp: DistributedDataParallel,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    world: World,
    steps: int,
) -> None:
    ddp.train()
    for batch in islice(batches, steps):
        ddp(**{name: tensor.to(world.device) for name, tensor in batch.items()}).loss.backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


def timed(work: Callable[[], None], world: World) -> float:
    """Seconds, the mean over the ranks."""
    started = time.perf_counter()
    work()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device=world.device)
    return float(reduce_mean(taken, world))
