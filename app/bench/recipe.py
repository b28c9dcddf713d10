"""The default recipe against the tutorials', on the same ranks, rows, model and global batch.

The tutorials pad every review to the maximum, tokenise in the collator, sample at random and step plain Adam. Rounds of
the two alternate, so that a machine that gets slower in between slows both; what counts is the median of the rounds'
ratios.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from app.bench.harness import set_up, timed, train_steps
from app.cli import launch
from app.distributed.process_group import join
from app.distributed.world import World
from app.settings import Settings
from app.training.optim import build_optimizer

ROUNDS, STEPS = 7, 30


def main(settings: Settings) -> None:
    with join(settings) as world:
        benchmark(settings, world)


def benchmark(settings: Settings, world: World) -> None:
    bench = set_up(settings, world)
    table, split, plan, tokenizer = bench.table, bench.split, bench.plan, bench.tokenizer

    def pad_and_tokenise(batch: list[int]) -> dict[str, torch.Tensor]:
        texts = [table.texts.iloc[split.train[i]] for i in batch]
        encoded = tokenizer(
            texts, padding="max_length", truncation=True, max_length=settings.max_length, return_tensors="pt"
        )
        return dict(encoded) | {"labels": torch.from_numpy(table.labels[split.train[batch]])}

    positions = range(len(split.train))
    theirs: DataLoader[Any] = DataLoader(
        positions,  # type: ignore[arg-type]
        plan.micro_size,
        sampler=DistributedSampler(positions, world.size, world.rank, seed=settings.seed),  # type: ignore[arg-type]
        collate_fn=pad_and_tokenise,
    )
    recipes: dict[str, tuple[DataLoader[Any], torch.optim.Optimizer]] = {
        "ours": (bench.loader, build_optimizer(bench.ddp, settings, 1e-4)),
        "tutorials": (theirs, torch.optim.Adam(bench.ddp.parameters(), lr=1e-4)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in recipes}
    for round_number in range(ROUNDS + 1):  # the first one warms up
        for name, (loader, optimizer) in recipes.items():
            loader.sampler.set_epoch(round_number)  # type: ignore[attr-defined]
            taken = timed(partial(train_steps, bench.ddp, loader, optimizer, None, world, STEPS), world)
            if round_number:
                seconds[name].append(taken)
    examples = STEPS * plan.global_size
    for name, times in seconds.items():
        world.print_main(
            f"{name:>10}: median {examples / statistics.median(times):7.1f} examples/s over {ROUNDS} rounds"
        )
    ratios = sorted(b / a for a, b in zip(seconds["ours"], seconds["tutorials"], strict=True))
    world.print_main(
        f"     ratio: median {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f} "
        f"({world.size} rank(s), {torch.get_num_threads()} thread(s) each)"
    )


if __name__ == "__main__":
    launch(main, __doc__)
