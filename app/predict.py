"""Predict the classes of reviews with a trained model: the folder of a run, a model folder, or a model on the Hub.

    python -m app.predict runs/ddp_loop/latest --csv new.csv --output new-predictions.csv
    torchrun --nproc_per_node=4 -m app.predict runs/ddp_loop/latest --csv new.csv

Batch size, maximum length, precision and threads are those of the run, unless flags say otherwise. The output has the
columns of a run's predictions.csv, with the labels only if the CSV has the label column. Then the metrics are printed.
The output is written at the end. If the program is interrupted, the same command resumes, with any number of ranks.

Some texts, as arguments or as lines of standard input; the output is printed, unless --output is given:

    python -m app.predict runs/ddp_loop/latest "房间很干净" "再也不来了"
    python -m app.predict runs/ddp_loop/latest < texts.txt

The rows that the run held out, which gives its predictions.csv again:

    python -m app.predict runs/ddp_loop/latest --split test
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from numpy.typing import NDArray

from .cli import parse_settings, settings_parser
from .common.errors import RunError, UserError, escape_control_characters
from .common.machine import arithmetic
from .common.terminal import has_piped_input
from .data.csv_checks import read_header
from .data.csv_table import Indices, ReviewTable, describe_dropped, read_reviews
from .data.loaders import form_eval_batches
from .data.split import split_reviews
from .data.tokenize import TokenRows, hash_tokens, lengths_of, occurring_tokens, tokenize, tokenize_in_memory
from .distributed.collectives import (
    broadcast_object,
    local_main_process_first,
    raise_on_all_ranks,
)
from .distributed.process_group import join
from .distributed.world import World
from .flags import REJECTED_BY_PREDICT, add_predict_flags
from .metrics.score import score
from .model.hub import resolve_commit
from .model.trained import load_trained
from .program import launch, select_precision
from .record.partial import PartialLogits
from .record.predictions import write_lines, write_predictions
from .runs.hashes import hash_weights
from .runs.reader import read_object
from .runs.schema import METRICS, MODEL_FOLDER, SETTINGS, SPLIT
from .settings import Settings
from .training.build import check_rows
from .training.console import quiet_libraries
from .training.predict_rows import compute_logits

# Settings of a run that determine its predictions, or the split of its rows.
OF_THE_RUN = (
    *("text_column", "label_column", "test_size", "validation_size", "seed", "max_length", "pad_to_multiple_of"),
    *("attn_implementation", "precision", "tf32", "deterministic", "eval_batch_size", "threads"),
)
Part = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Task:
    """What to predict.

    Attributes:
        settings: with the model's folder or name as `model`.
        run: the folder of the run, None for other models.
        texts: to predict instead of a CSV; None for a CSV.
        part: of the run's split; None for all rows of the CSV.
        output: None to print the predictions.
        requires_labels: whether the user has named the label column.
    """

    settings: Settings
    run: Path | None
    texts: list[str] | None
    part: Part | None
    output: Path | None
    requires_labels: bool


def main(settings: Settings, *, run_or_model: str, texts: list[str], split: Part | None, output: str | None) -> None:
    task, problem = None, None
    try:
        task = define_task(run_or_model, texts, part=split, output=output)
    except UserError as mistake:
        problem = str(mistake)
    with join(task.settings if task else settings, problem) as world:
        assert task is not None, "join has raised the problem"
        predict(task, world)


def define_task(name: str, texts: list[str], *, part: Part | None, output: str | None) -> Task:
    """Combine the command line with the settings of the run.

    Raises:
        UserError: there is no such run, or flags contradict each other.
    """
    folder, parser = Path(name), settings_parser(None, add_predict_flags, REJECTED_BY_PREDICT)
    run = folder if (folder / SETTINGS.name).is_file() else None
    if run is not None:
        parser.set_defaults(**settings_of_run(run).as_dict())
    given = parser.values(sys.argv[1:])
    values = {name: given[name] for name in Settings().as_dict()}
    settings = select_precision(Settings(**values | {"model": str(folder / MODEL_FOLDER) if run else name}))
    if part is not None:
        if run is None:
            raise UserError(f"--split {part}: {name} is not the folder of a run")
        csv = settings.csv or read_object(run, SETTINGS)["csv"]
        settings = replace(settings, csv=csv)
    if texts and settings.csv is not None:
        raise UserError("texts and a CSV exclude each other: remove --csv, --split or the texts")
    lines = texts or (read_lines() if settings.csv is None else None)
    path = (
        Path(output)
        if output
        else None
        if lines is not None
        else Path(f"{part or settings.csv_path.stem}-predictions.csv")
    )
    if path is not None and path.exists():
        raise UserError(f"{path}: exists: name another file with --output, or remove it")
    if path is not None and not path.absolute().parent.is_dir():
        raise UserError(f"--output {path}: its folder does not exist")
    named = any(text.replace("-", "_").startswith("__label_column") for text in sys.argv[1:])
    return Task(settings, run, lines, part, path, requires_labels=named or part is not None)


def settings_of_run(run: Path) -> Settings:
    """Return the settings of a run that matter for its predictions; the others have their defaults.

    Raises:
        UserError: the run has not finished, or settings.json is damaged.
    """
    read_object(run, METRICS)  # which is written last
    recorded = read_object(run, SETTINGS)
    flags = [f"--{name}={recorded[name]}" for name in OF_THE_RUN if recorded.get(name) is not None]
    try:
        return parse_settings(flags)
    except UserError as problem:
        raise UserError(f"{run / SETTINGS.name}: {problem}") from None


def read_lines() -> list[str]:
    """Return the lines of standard input that are not blank.

    Raises:
        UserError: there are none.
    """
    if not has_piped_input():
        raise UserError("nothing to predict: give --csv, --split, a text, or texts on standard input")
    try:
        lines = [line.rstrip("\r\n") for line in sys.stdin]
    except UnicodeDecodeError:
        raise UserError("standard input: is not valid text in this terminal's encoding") from None
    if not (texts := [line for line in lines if line.strip()]):
        raise UserError("nothing to predict: give --csv, --split, a text, or texts on standard input")
    return texts


def predict(task: Task, world: World) -> None:
    """Predict, write the output, and print the metrics. Collective.

    Raises:
        AgreedError: a user's mistake on any rank.
        RunError: a file cannot be written, or logits are not finite.
    """
    quiet_libraries(world)
    settings, start = task.settings, time.monotonic()
    with raise_on_all_ranks(world):
        if task.texts is not None and world.size > 1:
            raise UserError("texts are predicted by one process: start it without torchrun, or give --csv")
        commit = resolve_commit(settings) if world.is_main_process else None
    commit = broadcast_object(commit, world)
    with local_main_process_first(world):  # it downloads the model, and reads the CSV into the cache
        classifier = load_trained(settings, world.device, commit)
        table, has_labels = read_table(task, classifier.class_names)
        part = select_rows(task, table)
    if task.texts is None:
        cache_dir, hide_bar = Path(settings.cache_dir), settings.disable_tqdm
        rows = tokenize(
            table, classifier.tokenizer, settings.max_length, cache_dir=cache_dir, world=world, disable_tqdm=hide_bar
        )
    else:
        rows = tokenize_in_memory(table, classifier.tokenizer, settings.max_length)
    lengths = lengths_of(rows)
    with raise_on_all_ranks(world):
        config = classifier.model.config
        check_rows(settings, config, table=table, rows=rows, lengths=lengths, tokens=occurring_tokens(rows))
    batches = form_eval_batches(lengths[part], settings.eval_batch_size)
    # All that determines the logits: an interrupted prediction resumes only with the same.
    facts = [hash_tokens(rows, classifier.tokenizer), hash_weights(classifier.model), settings.eval_batch_size]
    facts += [settings.precision, settings.pad_to_multiple_of, torch.get_num_threads(), arithmetic(world.device)]
    facts += [task.part, settings.tf32, classifier.model.config._attn_implementation]
    key = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()
    partial: PartialLogits | nullcontext[None] = nullcontext()
    with raise_on_all_ranks(world):
        if world.is_main_process and task.texts is None and task.output is not None:
            partial = open_partial(task.output, key)
    with partial as kept:
        logits = compute_logits(
            classifier, TokenRows(rows, part), batches=batches, settings=settings, partial=kept, world=world
        )
        if world.is_main_process:
            finish(task, table, part, logits=logits, has_labels=has_labels)
    if world.is_main_process and task.output is not None:
        print(f"{'took':>14}  {time.monotonic() - start:.1f} s for {len(part):,} reviews, {world.size} rank(s)")


def read_table(task: Task, class_names: Sequence[str]) -> tuple[ReviewTable, bool]:
    """Return the reviews, and whether they have a column of labels.

    Raises:
        UserError: the CSV cannot be used, or has a label that is not a class of the model.
    """
    settings = task.settings
    if task.texts is not None:
        n = len(task.texts)
        texts = pd.Series(pd.arrays.ArrowExtensionArray(pa.array(task.texts, pa.large_string())))
        return ReviewTable(Path("-"), "", n, {}, tuple(class_names), np.arange(n), texts, np.full(n, -1)), False
    path, cache_dir = settings.csv_path, Path(settings.cache_dir)
    if task.part is not None:  # with the rows that the run had, of which those without a label were dropped
        return read_reviews(path, settings.text_column, settings.label_column, cache_dir=cache_dir), True
    has_labels = task.requires_labels or settings.label_column in read_header(path)
    label_column = settings.label_column if has_labels else None
    table = read_reviews(path, settings.text_column, label_column, class_names=class_names, cache_dir=cache_dir)
    return table, has_labels


def select_rows(task: Task, table: ReviewTable) -> Indices:
    """Return the positions in the table of the rows to predict, int64 (n,).

    Raises:
        UserError: the run had other rows.
    """
    if task.part is None:
        return np.arange(len(table), dtype=np.int64)
    assert task.run is not None, "define_task has checked it"
    settings = task.settings
    split = split_reviews(
        table,
        test_size=settings.test_size,
        validation_size=settings.validation_size,
        seed=settings.seed,
        columns=(settings.text_column, settings.label_column),
    )
    if split.fingerprint != read_object(task.run, SPLIT)["fingerprint"]:
        raise UserError(f"{table.path}: has changed since the run in {task.run} split it: give its file with --csv")
    part: Indices = getattr(split, task.part)
    if not len(part):
        raise UserError(f"--split {task.part}: the run in {task.run} has no such rows")
    return part


def open_partial(output: Path, key: str) -> PartialLogits:
    try:
        return PartialLogits(output, key)
    except OSError as problem:
        raise UserError(f"{output}: cannot be written: {problem.strerror or problem}") from None


def finish(task: Task, table: ReviewTable, part: Indices, *, logits: NDArray[np.float64], has_labels: bool) -> None:
    """Write the predictions, or print those of texts, and print the metrics of the labeled rows."""
    if task.output is None:
        write_lines(sys.stdout, table, part, logits=logits, has_labels=has_labels)
        return
    try:
        write_predictions(task.output, table, part, logits=logits, has_labels=has_labels)
    except OSError as problem:
        raise RunError(f"{task.output} could not be written: {problem.strerror or problem}") from None
    labels = table.labels[part]
    labeled = labels >= 0
    for line in describe_dropped(table):
        print(escape_control_characters(line))
    if labeled.any():
        scores = score(logits[labeled], labels[labeled])
        correct = round(scores.accuracy * scores.n)
        print(f"{'accuracy':>14}  {scores.accuracy:.4f} ({correct} of {scores.n} reviews), F1 {scores.f1:.4f}")
    print(f"{'predictions':>14}  {escape_control_characters(str(task.output))}")


if __name__ == "__main__":
    launch(main, __doc__, add_predict_flags, rejected=REJECTED_BY_PREDICT)
