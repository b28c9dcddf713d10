"""The recipes of others, written as in their documentation: of this project, they use only the data and weights.

None of them accumulates gradients: each rank trains on its share of the global batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count as count_from
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import (
    DataCollatorWithPadding,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

from ...distributed.world import World
from ...flags import BF16
from ...settings import Settings
from .recipe import CountingCollator, Recipe, Task, plain_copy, precision_of
from .turns import AccelerateState, Turns

LEARNING_RATE = 2e-5


def build_tutorial(name: str, task: Task, settings: Settings, *, folder: str, world: World) -> Recipe:
    """Build the recipe of most tutorials on DDP: every row padded to the maximum length, fp32, plain Adam."""
    data = task.data

    def tokenize_and_pad(positions: list[int]) -> dict[str, torch.Tensor]:
        rows = data.split.train[positions]
        texts = data.table.texts.iloc[rows].tolist()
        encoded = data.tokenizer(
            texts, padding="max_length", truncation=True, max_length=settings.max_length, return_tensors="pt"
        )
        return dict(encoded) | {"labels": torch.from_numpy(data.table.labels[rows])}

    collator = CountingCollator(tokenize_and_pad)
    positions: Any = range(len(data.split.train))
    sampler: DistributedSampler[Any] = DistributedSampler(positions, world.size, world.rank, seed=settings.seed)
    loader = DataLoader(positions, task.batch_size, sampler=sampler, collate_fn=collator)
    model = plain_copy(task.model).to(world.device)  # type: ignore[arg-type]
    wrapped = DistributedDataParallel(model, device_ids=None if world.device.type == "cpu" else [world.device])
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=LEARNING_RATE)

    def loop() -> Iterator[None]:
        wrapped.train()
        for epoch in count_from():
            sampler.set_epoch(epoch)
            for batch in loader:
                loss = wrapped(**{key: tensor.to(world.device) for key, tensor in batch.items()}).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                yield

    return recipe_of_loop(model, loop(), collator, world=world)


def build_accelerate(name: str, task: Task, settings: Settings, *, folder: str, world: World) -> Recipe:
    """Build the loop of accelerate's documentation (its examples/nlp_example.py)."""
    state, precision = AccelerateState(), precision_of(name)

    def pad(rows: list[dict[str, Any]]) -> Any:
        multiple = None if precision == "fp32" else 8
        return task.data.tokenizer.pad(rows, padding="longest", pad_to_multiple_of=multiple, return_tensors="pt")

    collator = CountingCollator(pad)
    with state.in_use():
        accelerator = Accelerator(
            cpu=world.device.type == "cpu", mixed_precision="no" if precision == "fp32" else precision
        )
        plain = plain_copy(task.model)
        optimizer: Any = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE)
        rows: Any = task.data.rows.select(task.data.split.train)
        loader: Any = DataLoader(rows, task.batch_size, shuffle=True, collate_fn=collator, drop_last=True)
        scheduler: Any = get_linear_schedule_with_warmup(optimizer, 100, max(101, task.total_steps))
        model, optimizer, loader, scheduler = accelerator.prepare(plain, optimizer, loader, scheduler)

    def loop() -> Iterator[None]:
        while True:
            model.train()
            for batch in loader:
                batch.to(accelerator.device)
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                yield

    return recipe_of_loop(plain, loop(), collator, world=world, state=state)


def build_trainer(name: str, task: Task, settings: Settings, *, folder: str, world: World) -> Recipe:
    """Build `Trainer` with its own defaults. Evaluation and checkpoints are turned off, as in all recipes."""
    state, on_cpu = AccelerateState(), world.device.type == "cpu"
    collator = CountingCollator(DataCollatorWithPadding(task.data.tokenizer))
    with state.in_use():
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=task.batch_size,
            max_steps=task.total_steps,
            bf16=precision_of(name) == "bf16",
            save_strategy="no",
            use_cpu=on_cpu,
            ddp_backend="gloo" if on_cpu else "nccl",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=plain_copy(task.model),
            args=arguments,
            data_collator=collator,
            train_dataset=task.data.rows.select(task.data.split.train),
            processing_class=task.data.tokenizer,
        )
    trainer.remove_callback(PrinterCallback)
    turns = Turns(trainer.train, world)
    trainer.add_callback(AfterEachStep(turns))

    def train(steps: int) -> None:
        with state.in_use():
            turns.train(steps)

    def end() -> None:
        with state.in_use():
            turns.end()

    return Recipe(trainer.model, train, lambda steps: collator.count(steps).summed(world), end)  # type: ignore[arg-type]


class AfterEachStep(TrainerCallback):
    """Let another recipe train after a Trainer's round."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.turns.after_step()


def recipe_of_loop(
    model: Any, loop: Iterator[None], collator: CountingCollator, *, world: World, state: AccelerateState | None = None
) -> Recipe:
    """Make a recipe of a generator that yields after each optimizer step."""
    state = state or AccelerateState()

    def train(steps: int) -> None:
        with state.in_use():
            for _ in range(steps):
                next(loop)

    def end() -> None:
        with state.in_use():
            loop.close()  # type: ignore[attr-defined]

    return Recipe(model, train, lambda steps: collator.count(steps).summed(world), end)


OTHERS: dict[str, Callable[..., Recipe]] = {
    "tutorial": build_tutorial,
    **dict.fromkeys(("trainer-defaults", f"trainer-defaults{BF16}"), build_trainer),
    **dict.fromkeys(("accelerate", f"accelerate{BF16}"), build_accelerate),
}
