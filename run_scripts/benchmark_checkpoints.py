"""What a checkpoint every 50 steps costs, on the same ranks, rows, model and batches.

Rounds of 50 steps with and without a checkpoint behind them alternate, in an order that alternates too, so that a
machine that gets slower in between slows both; what counts is the median of the rounds' ratios.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import DataCollatorWithPadding

from app.distributed.checkpoints import PREFIX, Checkpoints
from app.distributed.processes import World, from_main, join, launch, reduce_mean
from app.distributed.training_state import write_training_state
from app.model.load import load_classifier, load_tokenizer
from app.optimization import build_optimizer, build_scheduler
from app.preparation import quieten, read_and_split
from app.reviews.batches import train_loader
from app.reviews.tokens import lengths_of, tokenise
from app.settings import Settings

ROUNDS, STEPS = 7, 50


def main(settings: Settings) -> None:
    with join(settings) as world, folder_of_all(world) as folder:
        benchmark(settings, world, folder)


def benchmark(settings: Settings, world: World, folder: Path) -> None:
    quieten(world)
    table, split, plan = read_and_split(settings, world.size)
    tokenizer = load_tokenizer(settings, table.texts.iloc[split.train])
    rows = tokenise(table, tokenizer, settings.max_length, Path(settings.cache_dir), world)
    model = load_classifier(settings, table.class_names, tokenizer).model.to(device=world.device)
    ddp = DistributedDataParallel(model)
    optimizer = build_optimizer(ddp, settings, 1e-4)
    scheduler = build_scheduler(optimizer, settings, 2 * (ROUNDS + 1) * STEPS)
    train = rows.remove_columns("length").select(split.train)
    loader = train_loader(
        train, lengths_of(rows)[split.train], DataCollatorWithPadding(tokenizer), plan, world, settings
    )
    checkpoints = Checkpoints(folder / "checkpoints", settings.save_total_limit, "stop", world)
    ddp.train()

    def train_steps(step: int, save: bool) -> float:
        """Seconds, the mean over the ranks."""
        started = time.perf_counter()
        for _, batch in zip(range(STEPS), loader, strict=False):
            ddp(**{name: tensor.to(world.device) for name, tensor in batch.items()}).loss.backward()
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if save:
            checkpoints.save(f"{PREFIX}{step}", partial(write_training_state, ddp.module, optimizer, scheduler, world))
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device=world.device)
        return float(reduce_mean(taken))

    ratios = []
    for number in range(ROUNDS + 1):  # the first one warms up
        loader.sampler.set_epoch(number)  # type: ignore[attr-defined]
        order = (True, False) if number % 2 else (False, True)
        seconds = {save: train_steps(STEPS * (number + 1), save) for save in order}
        if number:
            ratios.append(seconds[True] / seconds[False])
            world.say(f"{seconds[False]:8.2f} s without, {seconds[True]:8.2f} s with: {ratios[-1]:.3f}")
    world.say(
        f"a checkpoint every {STEPS} steps costs {statistics.median(ratios) - 1:+.1%} (median of {ROUNDS} rounds, from "
        f"{min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%}; {world.size} rank(s))"
    )


@contextmanager
def folder_of_all(world: World) -> Iterator[Path]:
    """A folder that is removed at the end, the same on every rank."""
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=".") as mine:
        yield Path(from_main(mine))
        torch.distributed.barrier()


if __name__ == "__main__":
    launch(main, __doc__)
