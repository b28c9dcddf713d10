"""Build the data and the model from the settings alone, without a run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from datasets import Dataset
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..common.errors import UserError
from ..data import batches
from ..data.batches import BatchPlan, EvalSet, FullBatchSampler, plan_batches
from ..data.reviews import Indices, ReviewTable, clean, list_rows
from ..data.sources import open_sources
from ..data.split import Split, count_duplicates, split_reviews
from ..data.tokenize import hash_tokens, lengths_of, occurring_tokens, sum_over_tokens, tokenize
from ..distributed.collectives import all_gather_object, broadcast_object, local_main_process_first, raise_on_all_ranks
from ..distributed.world import World
from ..metrics.score import find_positive_class
from ..model.built_in import embeddings_of
from ..model.dropout import checkpoint_activations
from ..model.hub import resolve_commit
from ..model.load import Classifier, check_vocabulary, load_classifier, load_tokenizer
from ..model.vocabulary import tokens_of_model, trim_vocabulary
from ..settings import Settings
from ..strategies.base import Strategy
from ..strategies.ddp import DDPStrategy, Zero1Strategy
from ..strategies.fsdp import FullyShardStrategy


@dataclass(frozen=True)
class ReviewData:
    """The reviews, their split, and their token ids."""

    table: ReviewTable
    split: Split
    duplicates: dict[str, int]  # the reviews that occur in several parts, as returned by `count_duplicates`
    plan: BatchPlan
    commit: str | None  # the Hub commit of the model, None for any other model
    tokenizer: PreTrainedTokenizerBase
    embeddings: NDArray[np.float32] | None  # to start with, from `embeddings_of`
    rows: Dataset  # token ids and labels, in the order of the table
    lengths: NDArray[np.int64]  # (n,), the number of tokens of each row
    collator: DataCollatorWithPadding

    @property
    def train_rows(self) -> Dataset:
        return self.rows.select(self.split.train)

    def train_sampler(self, logical_ranks: Sequence[int], settings: Settings) -> FullBatchSampler:
        """Build the sampler of the training rows of this rank's logical ranks."""
        return FullBatchSampler(
            self.lengths[self.split.train],
            self.plan,
            logical_ranks=logical_ranks,
            seed=settings.seed,
            group_by_length=settings.train_sampling_strategy == "group_by_length",
        )

    def rows_of_step(self, logical_ranks: Sequence[int], settings: Settings, step: int) -> list[int]:
        """Return this rank's rows in the file, of an optimizer step counted from 1."""
        sampler = self.train_sampler(logical_ranks, settings)
        epoch, step_of_epoch = divmod(step - 1, self.plan.steps_per_epoch)
        sampler.set_epoch(epoch)
        return [int(row) for row in self.table.rows[self.split.train[sampler.epoch_rows()[step_of_epoch].numpy()]]]

    def train_loader(self, logical_ranks: Sequence[int], settings: Settings, world: World) -> DataLoader[Any]:
        """Build the loader of this rank's training micro-batches, as app/ddp_loop.py does."""
        sampler = self.train_sampler(logical_ranks, settings)
        options = batches.loader_options(self.collator, world.device)
        return DataLoader(self.train_rows, self.plan.micro_size, sampler=sampler, **options)

    def eval_set(self, name: str, settings: Settings, world: World) -> EvalSet:
        """Build an eval set: `validation` or `test`."""
        part: Indices = getattr(self.split, name)
        eval_set = batches.build_eval_set(
            name,
            self.rows.select(part),
            self.table.labels[part],
            batches=batches.form_eval_batches(self.lengths[part], settings.eval_batch_size),
            collator=self.collator,
            world=world,
        )
        return replace(eval_set, positive_class=find_positive_class(settings, self.table.class_names))


def read_and_split(
    settings: Settings, world_size: int, cache_dir: Path | None = None
) -> tuple[ReviewTable, Split, BatchPlan]:
    """Read the reviews, split them, and divide the training rows into batches. Without a cache, nothing is written.

    Raises:
        UserError: the file, the split or the batch size is invalid.
    """
    columns = (settings.text_column, settings.label_column)
    table = clean(open_sources(settings, cache_dir), columns, label_names=settings.label_names)
    find_positive_class(settings, table.class_names)  # rejects one that the file does not have
    split = split_reviews(
        table,
        test_size=settings.test_size,
        validation_size=settings.validation_size,
        seed=settings.seed,
        columns=columns,
    )
    return table, split, plan_batches(settings, len(split.train), world_size)


def build_data(settings: Settings, world: World) -> ReviewData:
    """Read, split and tokenize the reviews, with the same result on every rank. Collective.

    Raises:
        AgreedError: a user's mistake on any rank.
    """
    cache_dir = Path(settings.cache_dir)
    with local_main_process_first(world):  # it reads the CSV, and the others map what it has written
        table, split, plan = read_and_split(settings, world.size, cache_dir)
    versions = {library.__name__: library.__version__.partition("+")[0] for library in (torch, transformers)}
    check_equal(versions, world, remedy="install the same versions on every node")
    check_equal({"rows with the fingerprint": split.fingerprint[:12]}, world, remedy="give every node the same reviews")
    commit = broadcast_object(partial(resolve_commit, settings), world)
    texts = table.sample_texts(split.train)
    with local_main_process_first(world):
        tokenizer = load_tokenizer(replace(settings, revision=commit), texts, cache_dir=cache_dir)
    # If every node learned them, nodes with different CPUs could get different last bits.
    embeddings = broadcast_object(partial(embeddings_of, settings.model, tokenizer, texts, cache_dir=cache_dir), world)
    with local_main_process_first(world):  # it writes the tokens into the cache, unless they depend on Python code
        rows = tokenize(table, tokenizer, settings.max_length, cache_dir=cache_dir)
    return ReviewData(
        table=table,
        split=split,
        duplicates=broadcast_object(partial(count_duplicates, table, split), world),
        plan=plan,
        commit=commit,
        tokenizer=tokenizer,
        embeddings=embeddings,
        rows=rows,
        lengths=lengths_of(rows),
        collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=settings.pad_to_multiple_of),
    )


def build_model(settings: Settings, data: ReviewData, world: World) -> Classifier:
    """Load the classifier on the CPU, with the embeddings that training needs and the same weights on every rank.

    Collective. The strategy places it on this rank's device, because a sharded model need not fit there as a whole.

    Raises:
        AgreedError: a user's mistake on any rank.
    """
    with local_main_process_first(world):
        pinned, names = replace(settings, revision=data.commit), data.table.class_names
        classifier = load_classifier(pinned, names, data.tokenizer, device=world.device, embeddings=data.embeddings)
        accepted = {*data.tokenizer.model_input_names, "labels"}  # only the model knows them
        data.rows.set_format(columns=[name for name in data.rows.column_names if name in accepted])
        check_rows(settings.model, classifier.model.config, data.table, rows=data.rows, to_train=True)
        used = tokens_of_model(occurring_tokens(data.rows), data.tokenizer, classifier.model.config)
        trim_vocabulary(classifier.model, used, keep_unused=world.is_main_process)
        if settings.activation_checkpointing:
            checkpoint_activations(classifier.model)
    return replace(classifier, tokens_sha256=agree_on_model(classifier.model, data.rows, data.tokenizer, world=world))


def agree_on_model(model: PreTrainedModel, rows: Dataset, tokenizer: PreTrainedTokenizerBase, *, world: World) -> str:
    """Give all ranks rank 0's weights and padding side. Check that their tokens are equal, and return their hash."""
    tokenizer.padding_side = broadcast_object(lambda: tokenizer.padding_side, world)  # it depends on rounding
    tokens = hash_tokens(rows, tokenizer)
    facts = {"tokens with the hash": tokens[:12], "number of parameters": model.num_parameters()}
    check_equal(facts, world, remedy="give every node the same files of the model")
    if world.size > world.local_size:  # each node has loaded the weights from its own files
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0, group=world.control_group)
    return tokens


def check_rows(model: str, config: PretrainedConfig, table: ReviewTable, *, rows: Dataset, to_train: bool) -> bool:
    """Check that the model can process the tokens of every review, and tell whether any of them can share a batch.

    Args:
        to_train: whether they have to share batches.

    Raises:
        UserError: names the rows or the token that it cannot process, and the remedy.
    """
    text_config, is_empty, n_ends = config.get_text_config(), lengths_of(rows) == 0, np.ones(1)
    if is_empty.any():
        found = list_rows(table.rows[is_empty])
        raise UserError(f"--model {model}: its tokenizer returns no token for {found}: remove them in {table.path}")
    if config.is_encoder_decoder and not config.model_type.startswith("t5gemma"):  # which reads the last token
        n_ends = sum_over_tokens(rows, lambda tokens: tokens == config.eos_token_id)
        if (is_wrong := (n_ends != 1) if to_train else (n_ends < 1)).any():
            found, end = list_rows(table.rows[is_wrong]), f"its end-of-sequence token (id {config.eos_token_id})"
            remedy = "remove it, such as </s>, from their texts" if n_ends.any() else "its tokenizer does not append it"
            times, hint = ("exactly", f": {remedy}") if to_train else ("at least", "")
            where = f"unlike in {found} of {table.path}{hint}"
            raise UserError(f"--model {model}: it needs {end} {times} once per text, {where}")
    check_vocabulary(model, config, max(occurring_tokens(rows)[-1], text_config.pad_token_id or 0))
    return bool((n_ends == n_ends[0]).all())


def check_equal(facts: Mapping[str, object], world: World, *, remedy: str) -> None:
    """Check that all ranks have the same facts. Collective.

    Otherwise they would train different things, or wait for each other forever.

    Raises:
        AgreedError: names a rank that differs from rank 0, and all facts in which it does.
    """
    first, *others = all_gather_object(facts, world)
    with raise_on_all_ranks(world):
        for rank, mine in enumerate(others, 1):
            if differing := [f"{k} {v} (rank 0: {first[k]})" for k, v in mine.items() if v != first[k]]:
                raise UserError(f"rank {rank} has {', '.join(differing)}: {remedy}")


def select_strategy(settings: Settings, plan: BatchPlan, world: World) -> Strategy:
    """Return the strategy of a run."""
    wrapped_in_ddp = {"ddp": DDPStrategy, "zero1": Zero1Strategy}
    return wrapped_in_ddp.get(settings.strategy, FullyShardStrategy)(settings, plan, world)
