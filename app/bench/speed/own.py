"""The recipes of this project: the complete loops of app.ddp_loop and app.trainer_run, with the record of the run."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ... import ddp_loop, trainer_run
from ...data.sampler import BatchPlan, FullBatchSampler
from ...distributed.preemption import StopRequest
from ...distributed.world import World
from ...flags import BF16
from ...settings import Settings
from ...training.build import ReviewData
from ...training.prepare import NoProfiler, prepare
from .recipe import Count, Recipe, Task, precision_of
from .turns import AccelerateState, Turns

# The functions that train a prepared run. `Turns` ends each of them after its last step.
TRAININGS: dict[str, Any] = {"ddp_loop": ddp_loop.train, "trainer_run": trainer_run.train_and_test}


def build_own(name: str, task: Task, settings: Settings, *, folder: str, world: World) -> Recipe:
    """Prepare a run of one of the training paths, which writes its files into a new folder. Collective."""
    path_name = name.removesuffix(BF16)
    settings = replace(
        settings,
        precision=precision_of(name),  # type: ignore[arg-type]
        output_dir=folder,
        max_steps=task.total_steps,
        logging_steps=task.steps,  # so that `totals` are complete at the end of each round
        eval_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    state, output = AccelerateState(), io.StringIO()
    with redirect_stdout(output):
        prepared = prepare(path_name, settings, world)
        stop = WithoutSignals(world).__enter__()
    prepared = replace(prepared, data=DataOfRounds.of(prepared.data, task))
    turns = Turns(lambda: TRAININGS[path_name](prepared, world, stop), world)
    prepared = replace(prepared, profiler=TakeTurns(turns))
    totals = prepared.record.steps.totals
    counted = Count(0, 0, 0)

    def train(steps: int) -> None:
        with state.in_use(), redirect_stdout(output):
            turns.train(steps)

    def count(steps: int) -> Count:
        nonlocal counted
        before, counted = counted, Count(totals.examples, totals.tokens, totals.padded_tokens)
        return Count(
            counted.examples - before.examples,
            counted.tokens - before.tokens,
            counted.padded_tokens - before.padded_tokens,
        )

    def end() -> None:
        with state.in_use():
            turns.end()
        stop.__exit__(None)

    return Recipe(prepared.model, train, count, end)


class TakeTurns(NoProfiler):
    """Takes the place of the profiler, which both training paths call after each step."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self.turns = turns

    def step(self) -> None:
        self.turns.after_step()


class WithoutSignals(StopRequest):
    """A stop request that no signal makes. The ranks exchange it after each step, as in every run."""

    def __enter__(self) -> WithoutSignals:
        self.group = dist.new_group(backend="gloo", timeout=self.world.timeout)
        return self

    def __exit__(self, *_: object) -> None:
        if self.pending is not None:
            self.pending[1].wait()


# ---- batches that represent an epoch ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataOfRounds(ReviewData):
    """The data of a run whose only epoch consists of the batches of all rounds."""

    epoch_plan: BatchPlan  # of complete epochs
    steps: int
    rounds: int

    @classmethod
    def of(cls, data: ReviewData, task: Task) -> DataOfRounds:
        total = task.total_steps
        values = {field.name: getattr(data, field.name) for field in fields(ReviewData)}
        values["plan"] = replace(data.plan, steps_per_epoch=total, total_steps=total, epochs=1)
        return cls(**values, epoch_plan=data.plan, steps=task.steps, rounds=task.rounds)

    def train_sampler(self, logical_ranks: Sequence[int], settings: Settings) -> FullBatchSampler:
        sampler = SamplerOfRounds(
            self.lengths[self.split.train],
            self.epoch_plan,
            logical_ranks=logical_ranks,
            seed=settings.seed,
            group_by_length=settings.train_sampling_strategy == "group_by_length",
        )
        sampler.steps, sampler.rounds = self.steps, self.rounds
        return sampler


class SamplerOfRounds(FullBatchSampler):
    """Sample the batches of all rounds. With `group_by_length`, those of each round represent complete epochs.

    A few consecutive batches of an epoch would not: each of them has reviews of another length.

    Attributes:
        steps, rounds: the number of batches in a round, and of rounds.
    """

    steps: int
    rounds: int

    def __len__(self) -> int:
        return self.steps * self.rounds * self.plan.global_size // self.plan.ranks

    def batches(self) -> torch.Tensor:
        """Return the rows of every global batch, int64 (rounds x steps, rows)."""
        first_epoch, needed = self.epoch, self.steps * self.rounds
        epochs: list[torch.Tensor] = []
        while sum(map(len, epochs)) < needed:
            epochs.append(super().batches())
            self.epoch += 1
        self.epoch = first_epoch
        batches = torch.cat(epochs)
        if not self.group_by_length:
            return batches[:needed]
        order = represent(self.lengths[batches].amax(dim=1).numpy(), self.steps, self.rounds, seed=self.seed)
        return batches[torch.from_numpy(order)]


def represent(lengths: NDArray[np.int64], steps: int, rounds: int, *, seed: int) -> NDArray[np.int64]:
    """Choose batches for rounds, each of which represents all of them: one from each of `steps` quantiles of length.

    Different rounds get different batches of a quantile, if there are enough, in different orders.

    Args:
        lengths: int64 (n,), the length of each batch.

    Returns:
        int64 (rounds x steps,), positions in `lengths`.
    """
    random = np.random.default_rng(seed)
    quantiles = np.array_split(np.argsort(lengths, kind="stable"), steps)
    spread = [part[((np.arange(rounds) + 0.5) * len(part) / rounds).astype(np.int64)] for part in quantiles]
    by_round = np.stack([random.permutation(part) for part in spread], axis=1)
    return np.concatenate([random.permutation(one) for one in by_round]).astype(np.int64)
