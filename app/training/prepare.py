"""Everything that is decided before the first step, once for both roads: rows, tokens, batches, weights, learning
rate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from app.checkpoint.state import require_gradients
from app.data.csv_table import ReviewTable, read_reviews
from app.data.loaders import Collator, shard_loader, train_loader
from app.data.sampler import BatchPlan, plan_batches
from app.data.split import Indices, Split, split_reviews
from app.data.tokenize import lengths_of, tokenize
from app.distributed.collectives import (
    all_gather_object,
    broadcast_object,
    local_main_process_first,
    raise_on_all_ranks,
)
from app.distributed.world import World
from app.errors import UserError
from app.metrics.score import load_metrics
from app.model.hub import resolve_commit
from app.model.load import load_classifier, load_tokenizer
from app.runs.compatibility import check_compatible
from app.runs.folder import refuse_used
from app.runs.open import open_run
from app.runs.record import RunRecord
from app.runs.resume import Resume, find_resume
from app.settings import Settings
from app.training.console import quiet_libraries, start_up_block
from app.training.loss_guard import skip_step_if_nonfinite
from app.training.optim import default_learning_rate


@dataclass
class Preparation:
    """What a road is given. The loaders are this rank's; the model is on its device, on every rank with the same
    weights."""

    table: ReviewTable
    split: Split
    plan: BatchPlan
    tokenizer: PreTrainedTokenizerBase
    collator: Collator
    model: PreTrainedModel
    learning_rate: float
    train_rows: datasets.Dataset
    train_loader: DataLoader[Any]
    watched: str
    watched_loader: DataLoader[Any]
    test_loader: DataLoader[Any]
    record: RunRecord
    resume: Resume

    @property
    def watched_labels(self) -> NDArray[np.int64]:
        """Class ids, int64, of the rows that are evaluated during training: the validation rows, else the test rows."""
        return self.table.labels[self.split.validation if self.watched == "validation" else self.split.test]

    def guard_step(self, step: int, optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor) -> None:
        """Call before each optimizer step, counted from 1, on every rank.

        Raises:
            RunError: in the first step, a parameter got no gradient although DDP relies on it.
        """
        if step == self.resume.step + 1 and not self.record.settings.ddp_find_unused_parameters:
            require_gradients(self.model)
        skip_step_if_nonfinite(optimizer, grad_norm)

    @property
    def test_labels(self) -> NDArray[np.int64]:
        """Class ids, int64 (n_test,), of the test rows in file order."""
        return self.table.labels[self.split.test]


def read_and_split(settings: Settings, world_size: int) -> tuple[ReviewTable, Split, BatchPlan]:
    """The rows and who gets them.

    Raises:
        UserError: anything wrong with the file, the split or the batch.
    """
    table = read_reviews(settings.csv_path, settings.text_column, settings.label_column)
    columns = (settings.text_column, settings.label_column)
    split = split_reviews(table, settings.test_size, settings.validation_size, settings.seed, columns)
    return table, split, plan_batches(settings, len(split.train), world_size)


def prepare(path_name: str, settings: Settings, world: World) -> Preparation:
    """Reads, splits, tokenises, loads, checks that all ranks have the same rows, and says what will happen.

    Raises:
        AgreedError: a user's mistake on any rank; nothing has been written then but the token cache.
    """
    quiet_libraries(world)
    check_settings(settings, world)
    resume = find_resume(path_name, settings, world)
    with raise_on_all_ranks(world):
        if (
            world.is_main_process and resume.folder is None
        ):  # rank 0 alone: elsewhere NFS would remember that it is not there
            refuse_used(settings.output_dir)
        table, split, plan = read_and_split(settings, world.size)
    check_fingerprints(split.fingerprint, world)
    commit = None
    with raise_on_all_ranks(world):
        if world.is_main_process:
            commit = resolve_commit(settings)
    commit = broadcast_object(commit, world)
    with local_main_process_first(world):
        tokenizer = load_tokenizer(settings, table.texts.iloc[split.train], commit)
    rows = tokenize(table, tokenizer, settings.max_length, Path(settings.cache_dir), world, settings.disable_tqdm)
    with local_main_process_first(world):
        classifier = load_classifier(settings, table.class_names, tokenizer, commit)
    classifier.model.to(device=world.device)  # type: ignore[call-arg]
    settings.learning_rate = settings.learning_rate or default_learning_rate(classifier.pretrained)
    with raise_on_all_ranks(world):
        check_compatible(resume, path_name, settings, split.fingerprint, plan.total_steps, commit)
    with local_main_process_first(world):
        load_metrics()  # now: an evaluation that fails after hours of training would be too late

    collator = Collator(tokenizer)
    lengths = lengths_of(rows)
    inputs = rows.remove_columns("length")

    def evaluation_loader(part: Indices) -> DataLoader[Any]:
        return shard_loader(inputs.select(part), lengths[part], collator, world, settings)

    train_rows = inputs.select(split.train)
    loader = train_loader(train_rows, lengths[split.train], collator, plan, world, settings)

    def rows_of_step(step: int) -> list[int]:
        positions = loader.sampler.rows_of_step((step - 1) % plan.steps_per_epoch)  # type: ignore[attr-defined]
        return [int(row) for row in table.rows[split.train[positions]]]

    watched = "validation" if len(split.validation) else "test"
    record = open_run(path_name, settings, table, split, world, resume, rows_of_step, commit)
    world.print_main(
        start_up_block(path_name, settings, table, split, plan, classifier, record.folder, world, resume, commit)
    )
    return Preparation(
        table,
        split,
        plan,
        tokenizer,
        collator,
        classifier.model,
        settings.learning_rate,
        train_rows,
        loader,
        watched,
        evaluation_loader(split.validation if watched == "validation" else split.test),
        evaluation_loader(split.test),
        record,
        resume,
    )


# What may differ between nodes: places and machines.
PLACES = {"csv", "model", "cache_dir", "output_dir", "resume_from_checkpoint", "threads", "disable_tqdm"}


def check_settings(settings: Settings, world: World) -> None:
    """Every rank must have been told the same: else they train other things, or wait for each other in vain.

    Raises:
        AgreedError: they haven't; names the flags and the ranks that differ from rank 0.
    """
    requested = all_gather_object(
        {name: value for name, value in settings.as_dict().items() if name not in PLACES}, world
    )
    with raise_on_all_ranks(world):
        for rank, theirs in enumerate(requested):
            differing = [
                f"--{name} {theirs[name]} (rank 0: {requested[0][name]})"
                for name in theirs
                if theirs[name] != requested[0][name]
            ]
            if differing:
                raise UserError(f"rank {rank} was started with {', '.join(differing)}: give every node the same flags")


def check_fingerprints(fingerprint: str, world: World) -> None:
    """Every rank must have split the same rows the same way.

    Raises:
        AgreedError: they haven't; names the ranks that differ from rank 0.
    """
    fingerprints = all_gather_object(fingerprint, world)
    others = [rank for rank, other in enumerate(fingerprints) if other != fingerprints[0]]
    with raise_on_all_ranks(world):
        if others:
            raise UserError(
                f"rank(s) {', '.join(map(str, others))} read other rows than rank 0 (split fingerprint "
                f"{fingerprints[others[0]][:12]} against {fingerprints[0][:12]}): give every node the same CSV file"
            )
