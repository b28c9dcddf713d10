"""Benchmark: the default recipe compared with a typical tutorial's, with the same ranks, rows, model and global batch.

    torchrun --nproc_per_node=2 -m app.bench.recipe --csv reviews.csv

The tutorial's recipe pads every review to the maximum length, tokenizes in the collator, samples at random and uses
plain Adam. Rounds of the two recipes alternate, so that both are affected if the machine slows down. The result is the
median of the rounds' ratios. Any training flag applies to both.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from ..distributed.process_group import join
from ..distributed.world import World
from ..program import launch
from ..settings import Settings
from .harness import LEARNING_RATE, Bench, set_up, timed
from .rounds import in_rounds, ratios

ROUNDS, STEPS = 7, 30


def main(settings: Settings) -> None:
    with join(settings) as world:
        benchmark(settings, world)


def benchmark(settings: Settings, world: World) -> None:
    """Time both recipes in alternating rounds and print the ratio."""
    bench = set_up(settings, world)
    # With the fused kernel: the check for non-finite gradients in train_step requires it.
    adam = torch.optim.Adam(bench.wrapped.parameters(), lr=LEARNING_RATE, fused=True)
    total = (ROUNDS + 1) * STEPS
    recipes = {
        "samebits": (bench.loader, bench.optimization(total)),
        "tutorial": (tutorial_loader(bench), bench.optimization(total, optimizer=adam)),
    }

    def train(name: str, round_number: int) -> float:
        loader, optimization = recipes[name]
        loader.sampler.set_epoch(round_number)  # type: ignore[attr-defined]
        return timed(partial(bench.train_steps, loader, optimization, steps=STEPS), world)

    seconds = in_rounds({name: partial(train, name) for name in recipes}, ROUNDS, warm_up=True)
    examples = STEPS * bench.data.plan.global_size
    for name, times in seconds.items():
        rate = examples / statistics.median(times)
        world.print_main(f"{name:>10}: median {rate:7.1f} reviews per second over {ROUNDS} rounds")
    faster = ratios(seconds["tutorial"], seconds["samebits"])
    world.print_main(
        f"     ratio: median {faster.middle:.2f}, from {faster.low:.2f} to {faster.high:.2f} "
        f"({world.size} rank(s), {torch.get_num_threads()} thread(s) each, {settings.precision})"
    )


def tutorial_loader(bench: Bench) -> DataLoader[Any]:
    """Build the tutorial's loader: it tokenizes and pads each batch when it is needed."""
    data, settings, world = bench.data, bench.settings, bench.world

    def tokenize_and_pad(batch: list[int]) -> dict[str, torch.Tensor]:
        rows = data.split.train[batch]
        texts = data.table.texts.iloc[rows].tolist()
        encoded = data.tokenizer(
            texts, padding="max_length", truncation=True, max_length=settings.max_length, return_tensors="pt"
        )
        return dict(encoded) | {"labels": torch.from_numpy(data.table.labels[rows])}

    positions = range(len(data.split.train))
    return DataLoader(
        positions,  # type: ignore[arg-type]
        data.plan.micro_size,
        sampler=DistributedSampler(positions, world.size, world.rank, seed=settings.seed),  # type: ignore[arg-type]
        collate_fn=tokenize_and_pad,
    )


if __name__ == "__main__":
    launch(main, __doc__)
