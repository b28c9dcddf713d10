"""Build the data and the model from the settings alone, without a run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from ..common.errors import UserError
from ..data.csv_table import ReviewTable, read_reviews
from ..data.loaders import Collator, EvalSet, build_eval_set, form_eval_batches, loader_options
from ..data.sampler import BatchPlan, FullBatchSampler, plan_batches
from ..data.split import Indices, Split, count_duplicates, split_reviews
from ..data.tokenize import count_truncated, hash_tokens, lengths_of, tokenize
from ..distributed.collectives import (
    all_gather_object,
    broadcast_object,
    local_main_process_first,
    raise_on_all_ranks,
)
from ..distributed.world import World
from ..model.checkpointing import checkpoint_activations
from ..model.hub import resolve_commit
from ..model.inputs import wait_before_reads
from ..model.load import Classifier, load_classifier, load_tokenizer
from ..settings import Settings
from .row_checks import check_rows

SplitFunction = Callable[..., Split]  # with the parameters of split_reviews


@dataclass(frozen=True)
class ReviewData:
    """The reviews, their split, and their token ids.

    Attributes:
        table: the reviews and their class ids.
        split: which rows are for training, validation and test.
        plan: how the training rows are divided into batches.
        commit: the Hub commit of the model, None for any other model.
        tokenizer: the model's tokenizer.
        rows: token ids and labels, in the order of the table.
        lengths: int64 (n,), the number of tokens of each row.
        n_truncated: how many reviews have more than `max_length` tokens and were truncated.
        tokens_hash: SHA-256 of the tokens, as `hash_tokens` returns it.
    """

    table: ReviewTable
    split: Split
    plan: BatchPlan
    commit: str | None
    tokenizer: PreTrainedTokenizerBase
    rows: Dataset
    lengths: NDArray[np.int64]
    n_truncated: int
    tokens_hash: str

    @property
    def collator(self) -> Collator:
        """The collator that pads the rows of a batch."""
        return Collator(self.tokenizer)

    @cached_property
    def duplicates(self) -> dict[str, int]:
        """The reviews of a part that also occur in another part, as `count_duplicates` returns them."""
        return count_duplicates(self.table, self.split)

    @property
    def train_rows(self) -> Dataset:
        """The tokenized training rows."""
        return self.rows.select(self.split.train)

    def train_sampler(self, logical_ranks: Sequence[int], settings: Settings) -> FullBatchSampler:
        """Build the sampler of this rank's training rows, those of its logical ranks."""
        return FullBatchSampler(
            self.lengths[self.split.train],
            self.plan,
            logical_ranks=logical_ranks,
            seed=settings.seed,
            group_by_length=settings.train_sampling_strategy == "group_by_length",
        )

    def loader_options(self, device: torch.device) -> dict[str, Any]:
        """Return the arguments that all loaders share: how rows become batches."""
        return loader_options(self.collator, device)

    def train_loader(self, logical_ranks: Sequence[int], settings: Settings, world: World) -> DataLoader[Any]:
        """Build the loader of this rank's training micro-batches, as app/ddp_loop.py does."""
        sampler = self.train_sampler(logical_ranks, settings)
        return DataLoader(self.train_rows, self.plan.micro_size, sampler=sampler, **self.loader_options(world.device))

    def eval_set(self, name: str, settings: Settings, world: World) -> EvalSet:
        """Build an eval set: `validation` or `test`."""
        part: Indices = getattr(self.split, name)
        return build_eval_set(
            name,
            self.rows.select(part),
            self.table.labels[part],
            batches=form_eval_batches(self.lengths[part], settings.eval_batch_size),
            collator=self.collator,
            world=world,
        )


def read_and_split(
    settings: Settings, world_size: int, split_rows: SplitFunction = split_reviews
) -> tuple[ReviewTable, Split, BatchPlan]:
    """Read the reviews, split them, and divide the training rows into batches.

    Raises:
        UserError: the file, the split or the batch size is invalid.
    """
    table = read_reviews(settings.csv_path, settings.text_column, settings.label_column)
    split = split_rows(
        table,
        test_size=settings.test_size,
        validation_size=settings.validation_size,
        seed=settings.seed,
        columns=(settings.text_column, settings.label_column),
    )
    return table, split, plan_batches(settings, len(split.train), world_size)


def build_data(settings: Settings, world: World, split_rows: SplitFunction = split_reviews) -> ReviewData:
    """Read, split and tokenize the reviews, with the same result on every rank. Collective.

    Args:
        split_rows: replaces `split_reviews`, as the ablation does.

    Raises:
        AgreedError: a user's mistake on any rank.
    """
    with raise_on_all_ranks(world):
        table, split, plan = read_and_split(settings, world.size, split_rows)
    check_fingerprints(split.fingerprint, world)
    commit = None
    with raise_on_all_ranks(world):
        if world.is_main_process:
            commit = resolve_commit(settings)
    commit = broadcast_object(commit, world)
    with local_main_process_first(world):
        tokenizer = load_tokenizer(settings, table.texts.iloc[split.train], commit)
    rows = tokenize(
        table,
        tokenizer,
        settings.max_length,
        cache_dir=Path(settings.cache_dir),
        world=world,
        disable_tqdm=settings.disable_tqdm,
    )
    inputs = rows.remove_columns(["length", "truncated"])
    return ReviewData(
        table=table,
        split=split,
        plan=plan,
        commit=commit,
        tokenizer=tokenizer,
        rows=inputs,
        lengths=lengths_of(rows),
        n_truncated=count_truncated(rows),
        tokens_hash=hash_tokens(rows, tokenizer),
    )


def build_model(settings: Settings, data: ReviewData, world: World) -> Classifier:
    """Load the classifier on the CPU, with the same weights on every rank. Collective.

    The strategy places it on this rank's device, because a sharded model need not fit there as a whole.

    Raises:
        AgreedError: a user's mistake on any rank.
    """
    with local_main_process_first(world):
        classifier = load_classifier(settings, data.table.class_names, data.tokenizer, commit=data.commit)
        check_rows(settings, classifier.model.config, table=data.table, rows=data.rows, lengths=data.lengths)
        if settings.activation_checkpointing:
            checkpoint_activations(classifier.model)
    wait_before_reads(classifier.model, world)
    return classifier


def check_fingerprints(fingerprint: str, world: World) -> None:
    """Check that every rank has split the same rows the same way. Collective.

    Raises:
        AgreedError: names the ranks that differ from rank 0.
    """
    fingerprints = all_gather_object(fingerprint, world)
    others = [rank for rank, other in enumerate(fingerprints) if other != fingerprints[0]]
    with raise_on_all_ranks(world):
        if others:
            raise UserError(
                f"rank(s) {', '.join(map(str, others))} read different rows than rank 0 (split fingerprint "
                f"{fingerprints[others[0]][:12]}, not {fingerprints[0][:12]}): give every node the same CSV file"
            )
