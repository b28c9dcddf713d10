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
import io
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..common.errors import RunError, UserError, escape_control_characters
from ..common.formats import labeled
from ..common.machine import arithmetic
from ..common.terminal import prints_to_terminal
from ..data.loaders import form_eval_batches
from ..data.reviews import Indices, ReviewTable, describe_dropped
from ..data.tokenize import TokenRows, hash_tokens, lengths_of, occurring_tokens, tokenize, tokenize_in_memory
from ..distributed.collectives import (
    broadcast_object,
    local_main_process_first,
    raise_on_all_ranks,
)
from ..distributed.process_group import join
from ..distributed.world import World
from ..flags import REJECTED_BY_PREDICT, add_predict_flags
from ..metrics.score import load_metrics, score
from ..model.hub import resolve_commit
from ..model.load import load_trained
from ..program import launch
from ..record.predictions import write_lines, write_predictions
from ..runs.hashes import hash_weights
from ..settings import Settings
from ..training.check_rows import check_rows
from ..training.console import quiet_libraries
from .logits import compute_logits
from .partial import PartialLogits
from .task import Part, Task, define_task, read_table, select_rows


def main(settings: Settings, *, run_or_model: str, texts: list[str], split: Part | None, output: str | None) -> None:
    task, problem = None, None
    try:
        task = define_task(run_or_model, texts, part=split, output=output)
    except UserError as mistake:
        problem = str(mistake)
    with join(task.settings if task else settings, problem) as world:
        assert task is not None, "join has raised the problem"
        predict(task, world)


def predict(task: Task, world: World) -> None:
    """Predict, write the output, and print the metrics. Collective.

    Raises:
        AgreedError: a user's mistake on any rank.
        RunError: a file cannot be written, or logits are not finite.
    """
    quiet_libraries(world)
    settings, start = task.settings, time.monotonic()
    with raise_on_all_ranks(world), model_is_no_flag():
        commit = resolve_commit(settings) if world.is_main_process else None
    commit = broadcast_object(commit, world)
    with local_main_process_first(world):  # it downloads the model, and reads the CSV into the cache
        with model_is_no_flag():
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
        if world.is_main_process and has_labels:
            load_metrics()
        if world.is_main_process and task.texts is None and task.output is not None:
            partial = open_partial(task.output, key)
    with partial as kept:
        logits = compute_logits(
            classifier, TokenRows(rows, part), batches=batches, settings=settings, partial=kept, world=world
        )
        if world.is_main_process:
            finish(task, table, part, logits=logits, has_labels=has_labels)
    if world.is_main_process and task.output is not None:
        print(labeled("took", f"{time.monotonic() - start:.1f} s for {len(part):,} reviews, {world.size} rank(s)"))


@contextmanager
def model_is_no_flag() -> Iterator[None]:
    """Leave out `--model` from messages about the model."""
    try:
        yield
    except UserError as problem:
        raise UserError(str(problem).removeprefix("--model ")) from None


def open_partial(output: Path, key: str) -> PartialLogits:
    try:
        return PartialLogits(output, key)
    except OSError as problem:
        raise UserError(f"{output}: cannot be written: {problem.strerror or problem}") from None


def print_lines(table: ReviewTable, part: Indices, *, logits: NDArray[np.float64], has_labels: bool) -> None:
    """Print the predictions of texts as CSV."""
    lines = io.StringIO()
    write_lines(lines, table, part, logits=logits, has_labels=has_labels)
    text = lines.getvalue()
    if prints_to_terminal():  # a file or a pipe gets the texts as they are
        text = "\n".join(map(escape_control_characters, text.split("\n")))
    print(text, end="", flush=True)


def finish(task: Task, table: ReviewTable, part: Indices, *, logits: NDArray[np.float64], has_labels: bool) -> None:
    """Write the predictions, or print those of texts, and print the metrics of the labeled rows."""
    if task.output is None:
        try:
            print_lines(table, part, logits=logits, has_labels=has_labels)
        except OSError as problem:
            raise RunError(f"standard output could not be written: {problem.strerror or problem}") from None
        return
    if os.path.lexists(task.output):  # `define_task` has checked it at the start, without a lock
        raise RunError(
            f"{task.output}: has been created meanwhile: remove it, and start again to write the predictions"
        )
    try:
        write_predictions(task.output, table, part, logits=logits, has_labels=has_labels)
    except OSError as problem:
        raise RunError(f"{task.output} could not be written: {problem.strerror or problem}") from None
    labels = table.labels[part]
    known = labels >= 0
    for line in describe_dropped(table):
        print(escape_control_characters(line))
    if known.any():
        scores = score(logits[known], labels[known])
        correct = round(scores.accuracy * scores.n)
        print(labeled("accuracy", f"{scores.accuracy:.4f} ({correct} of {scores.n} reviews), F1 {scores.f1:.4f}"))
    print(labeled("predictions", task.output))


if __name__ == "__main__":
    launch(main, __doc__, add_predict_flags, rejected=REJECTED_BY_PREDICT)
