"""Everything that is decided before the first step, once for both roads: rows, tokens, batches, weights, learning
rate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from app.distributed.processes import World, from_main, gather_objects, local_main_first, together
from app.distributed.training_state import require_gradients
from app.errors import UserError, escape_control_characters
from app.files import refuse_used
from app.loss_guard import skip_step_if_nonfinite
from app.metrics.score import Scores, load_metrics
from app.model.load import Classifier, load_classifier, load_tokenizer, resolve_commit
from app.optimization import default_learning_rate, warmup_steps
from app.resume import Resume, check_fits, find_resume
from app.reviews.batches import BatchPlan, Collator, plan_batches, shard_loader, train_loader
from app.reviews.split import Indices, Split, split_reviews
from app.reviews.table import ReviewTable, describe_dropped, read_reviews
from app.reviews.tokens import lengths_of, tokenise
from app.run_record import RunRecord
from app.settings import SAMPLE_CSV, Settings


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
    quieten(world)
    check_settings(settings)
    resume = find_resume(path_name, settings, world)
    with together():
        if world.is_main and resume.folder is None:  # rank 0 alone: elsewhere NFS would remember that it is not there
            refuse_used(settings.output_dir)
        table, split, plan = read_and_split(settings, world.size)
    check_fingerprints(split.fingerprint)
    commit = None
    with together():
        if world.is_main:
            commit = resolve_commit(settings)
    commit = from_main(commit)
    with local_main_first(world):
        tokenizer = load_tokenizer(settings, table.texts.iloc[split.train], commit)
    rows = tokenise(table, tokenizer, settings.max_length, Path(settings.cache_dir), world, settings.disable_tqdm)
    with local_main_first(world):
        classifier = load_classifier(settings, table.class_names, tokenizer, commit)
    classifier.model.to(device=world.device)  # type: ignore[call-arg]
    settings.learning_rate = settings.learning_rate or default_learning_rate(classifier.pretrained)
    with together():
        check_fits(resume, path_name, settings, split.fingerprint, plan.total_steps, commit)
    with local_main_first(world):
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
    record = RunRecord(path_name, settings, table, split, world, resume, rows_of_step, commit)
    world.say(start_up_block(path_name, settings, table, split, plan, classifier, record.folder, world, resume, commit))
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


def quieten(world: World) -> None:
    """Libraries' own bars and warnings: none from the ranks that nobody reads."""
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    if not world.is_main:
        transformers.logging.set_verbosity_error()
        datasets.logging.set_verbosity_error()


# What may differ between nodes: places and machines.
PLACES = {"csv", "model", "cache_dir", "output_dir", "resume_from_checkpoint", "threads", "disable_tqdm"}


def check_settings(settings: Settings) -> None:
    """Every rank must have been told the same: else they train other things, or wait for each other in vain.

    Raises:
        AgreedError: they haven't; names the flags and the ranks that differ from rank 0.
    """
    told = gather_objects({name: value for name, value in settings.as_dict().items() if name not in PLACES})
    with together():
        for rank, theirs in enumerate(told):
            differing = [
                f"--{name} {theirs[name]} (rank 0: {told[0][name]})" for name in theirs if theirs[name] != told[0][name]
            ]
            if differing:
                raise UserError(f"rank {rank} was started with {', '.join(differing)}: give every node the same flags")


def check_fingerprints(fingerprint: str) -> None:
    """Every rank must have split the same rows the same way.

    Raises:
        AgreedError: they haven't; names the ranks that differ from rank 0.
    """
    fingerprints = gather_objects(fingerprint)
    others = [rank for rank, other in enumerate(fingerprints) if other != fingerprints[0]]
    with together():
        if others:
            raise UserError(
                f"rank(s) {', '.join(map(str, others))} read other rows than rank 0 (split fingerprint "
                f"{fingerprints[others[0]][:12]} against {fingerprints[0][:12]}): give every node the same CSV file"
            )


def start_up_block(
    path_name: str,
    settings: Settings,
    table: ReviewTable,
    split: Split,
    plan: BatchPlan,
    classifier: Classifier,
    folder: Path,
    world: World,
    resume: Resume,
    commit: str | None,
) -> str:
    """What will happen, in a few lines."""
    validation = f"{len(split.validation)} validation + " if len(split.validation) else ""
    default = (
        "" if table.path != SAMPLE_CSV else " (the bundled synthetic sample; see data/README.md for the real file)"
    )
    warmup = warmup_steps(settings, plan.total_steps)
    classes = ", ".join(table.class_names)
    weights = "pretrained weights" if classifier.pretrained else "weights initialised here"
    parameters = classifier.model.num_parameters() / 1e6
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    lines = [
        ("road", path_name),
        ("reviews", f"{table.path}{default}"),
        *(("dropped", line) for line in describe_dropped(table)),
        (
            "rows",
            f"{len(split.train)} training + {validation}{len(split.test)} test; classes {classes}",
        ),
        ("split", f"seed {settings.seed}, fingerprint {split.fingerprint[:16]}"),
        ("model", f"{classifier.origin}{f' at {commit[:12]}' if commit else ''}; {parameters:.1f} M parameters"),
        ("batch", f"{plan}, {settings.train_sampling_strategy}"),
        (
            "steps",
            f"{plan.total_steps} ({plan.steps_per_epoch} an epoch), {warmup} of warm-up",
        ),
        ("learning rate", f"{settings.learning_rate:g} (AdamW, {settings.lr_scheduler_type}; {weights})"),
        ("machine", f"{world.size} x {device}, {torch.get_num_threads()} thread(s) a rank, {settings.precision}"),
        ("files", f"{folder}/"),
    ]
    if resume.checkpoint is not None:
        lines += [("resumed from", f"{resume.checkpoint} (step {resume.step})")]
        if resume.changes:
            changes = "; ".join(resume.changes)
            lines += [("changed", f"{changes}: the same batches, but other dropout masks from here on")]
        threads, before = torch.get_num_threads(), resume.state.get("threads")
        if before not in (None, threads):
            lines += [
                ("changed", f"threads per rank: {threads}, was {before}: sums are rounded differently from here on")
            ]
    return "\n".join(f"{name:>14}  {escape_control_characters(text)}" for name, text in lines)


def closing_block(scores: Scores, record: RunRecord) -> str:
    """What came out, and where it is."""
    right = round(scores.accuracy * scores.n)
    lines = [
        ("test accuracy", f"{scores.accuracy:.4f} ({right} of {scores.n} reviews), F1 {scores.f1:.4f}"),
        (
            "training took",
            f"{record.totals.train_seconds:.1f} s, {record.totals.examples_per_second:.0f} reviews a second",
        ),
        ("model", f"{record.model_folder}/"),
    ]
    return "\n".join(f"{name:>14}  {escape_control_characters(text)}" for name, text in lines)
