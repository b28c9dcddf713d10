"""The default recipe against the tutorials', on the same ranks, rows, model and global batch.

The tutorials pad every review to the maximum, tokenise in the collator, sample at random and step plain Adam. Rounds of
the two alternate, so that a machine that gets slower in between slows both; what counts is the median of the rounds'
ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import DataCollatorWithPadding

from app.distributed.processes import World, join, launch, reduce_mean
from app.model.load import load_classifier, load_tokenizer
from app.optimization import build_optimizer
from app.preparation import quieten, read_and_split
from app.reviews.batches import train_loader
from app.reviews.tokens import lengths_of, tokenise
from app.settings import Settings

ROUNDS, STEPS = 7, 30


def main(settings: Settings) -> None:
    with join(settings) as world:
        benchmark(settings, world)


def benchmark(settings: Settings, world: World) -> None:
    quieten(world)
    table, split, plan = read_and_split(settings, world.size)
    tokenizer = load_tokenizer(settings, table.texts.iloc[split.train])
    rows = tokenise(table, tokenizer, settings.max_length, Path(settings.cache_dir), world)
    model = load_classifier(settings, table.class_names, tokenizer).model.to(device=world.device)
    ddp = DistributedDataParallel(model)
    collator = DataCollatorWithPadding(tokenizer)
    train = rows.remove_columns("length").select(split.train)
    ours = train_loader(train, lengths_of(rows)[split.train], collator, plan, world, settings)

    def pad_and_tokenise(batch: list[int]) -> dict[str, torch.Tensor]:
        texts = [table.texts.iloc[split.train[i]] for i in batch]
        encoded = tokenizer(
            texts, padding="max_length", truncation=True, max_length=settings.max_length, return_tensors="pt"
        )
        return encoded | {"labels": torch.from_numpy(table.labels[split.train[batch]])}

    positions = range(len(split.train))
    theirs: DataLoader[Any] = DataLoader(
        positions,  # type: ignore[arg-type]
        plan.micro_size,
        sampler=DistributedSampler(positions, world.size, world.rank, seed=settings.seed),  # type: ignore[arg-type, var-annotated]
        collate_fn=pad_and_tokenise,
    )
    recipes: dict[str, tuple[DataLoader[Any], torch.optim.Optimizer]] = {
        "ours": (ours, build_optimizer(ddp, settings, 1e-4)),
        "tutorials": (theirs, torch.optim.Adam(ddp.parameters(), lr=1e-4)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in recipes}
    for round_number in range(ROUNDS + 1):  # the first one warms up
        for name, (loader, optimizer) in recipes.items():
            loader.sampler.set_epoch(round_number)  # type: ignore[attr-defined]
            taken = timed(lambda loader=loader, optimizer=optimizer: train_steps(ddp, loader, optimizer, world))
            mean = float(reduce_mean(torch.tensor(taken, dtype=torch.float64, device=world.device)))
            if round_number:
                seconds[name].append(mean)
    examples = STEPS * plan.global_size
    for name, times in seconds.items():
        world.say(f"{name:>10}: median {examples / statistics.median(times):7.1f} examples/s over {ROUNDS} rounds")
    ratios = sorted(b / a for a, b in zip(seconds["ours"], seconds["tutorials"], strict=True))
    world.say(
        f"     ratio: median {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f} "
        f"({world.size} rank(s), {torch.get_num_threads()} thread(s) each)"
    )


def train_steps(
    ddp: DistributedDataParallel, batches: Iterable[Any], optimizer: torch.optim.Optimizer, world: World
) -> None:
    ddp.train()
    for batch in islice(batches, STEPS):
        ddp(**{name: tensor.to(world.device) for name, tensor in batch.items()}).loss.backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    launch(main, __doc__)
