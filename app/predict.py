"""Predict the classes of reviews with a trained model: the folder of a run, a model folder, or a model on the Hub.

    python -m app.predict runs/ddp_loop/latest --csv new.csv --output new-predictions.csv
    torchrun --nproc_per_node=4 -m app.predict runs/ddp_loop/latest --csv new.csv

Batch size, maximum length, precision and threads are those of the run, unless flags say otherwise. The output has the
columns of a run's predictions.csv, with labels only if the CSV has them. It is written at the end, with the metrics.

Some texts, as arguments or as lines of standard input; the output is printed, unless --output is given:

    python -m app.predict runs/ddp_loop/latest "房间很干净" "再也不来了"
    python -m app.predict runs/ddp_loop/latest < texts.txt

The rows that the run held out, which gives its predictions.csv again:

    python -m app.predict runs/ddp_loop/latest --split test
"""

from __future__ import annotations

from .cli import OneLineParser
from .program import Program, select_precision

FILES = ("csv", "validation_file", "test_file", "dataset_name")
# Settings of a run that determine its predictions, and those that determine the split of its rows.
OF_PREDICTIONS = (
    *("text_column", "label_column", "label_names", "max_length", "pad_to_multiple_of", "attn_implementation"),
    *("precision", "tf32", "deterministic", "eval_batch_size", "threads", "positive_class"),
)
OF_SPLIT = ("test_size", "validation_size", "seed")
USED = (
    *(*FILES, "encoding", *OF_PREDICTIONS),
    *("cache_dir", "revision", "trust_remote_code", "use_cpu", "ddp_timeout", "disable_tqdm"),
)


def add_arguments(parser: OneLineParser) -> None:
    parser.add_argument(
        "run_or_model", metavar="RUN_OR_MODEL", help="folder of a run, model folder, or model on the Hub"
    )
    parser.add_argument("texts", nargs="*", default=[], metavar="TEXT", help="texts to predict instead of a CSV")
    parser.add_argument("--split", choices=("train", "validation", "test"), help="predict these rows of the run's data")
    parser.add_argument(
        "--output",
        metavar="FILE.csv",
        help="a new file; default: <CSV>-predictions.csv in the current folder, with --split <split>-predictions.csv",
    )


PROGRAM = Program(__doc__, add_arguments, only=USED)
if __name__ == "__main__":
    PROGRAM.check_command_line()  # before torch is imported

import os
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import DataCollatorWithPadding

from .common.errors import RunError, UserError, escape_control_characters
from .common.files import write_text
from .common.formats import labeled
from .common.terminal import hides_progress
from .data.batches import build_eval_set, form_eval_batches
from .data.reviews import Indices, ReviewTable, clean, describe_dropped
from .data.sources import Source, open_file
from .data.tokenize import describe_unknown, lengths_of, tokenize
from .ddp_loop import evaluate
from .distributed.collectives import broadcast_object, local_main_process_first
from .distributed.environment import rank_and_sizes
from .distributed.process_group import join
from .distributed.world import World
from .metrics.score import find_positive_class, score
from .model.hub import resolve_commit
from .model.load import load_trained, usable_length
from .record.results import predictions_as_csv
from .runs.reader import read_object
from .runs.schema import METRICS, MODEL_FOLDER, SETTINGS, SPLIT
from .settings import Settings
from .training.build import agree_on_model, check_rows, read_and_split
from .training.console import quiet_libraries

Part = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Task:
    """What to predict: the command line combined with the settings of the run."""

    settings: Settings  # with the model's folder or name as `model`
    run: Path | None  # None for other models
    texts: list[str] | None  # to predict instead of a CSV
    part: Part | None  # of the run's split; None for all rows of the CSV
    output: Path | None  # None to print the predictions
    given: Collection[str]  # the settings on the command line: the model must accept a length, the CSV have labels


def main(settings: Settings, *, run_or_model: str, texts: list[str], split: Part | None, output: str | None) -> None:
    task = define_task(run_or_model, texts, part=split, output=output)
    with join(task.settings) as world:
        predict(task, world)


def predict(task: Task, world: World) -> None:
    """Predict, write the output, and print the metrics. Collective.

    Raises:
        AgreedError: a user's mistake on any rank.
        RunError: the output cannot be written, or logits are not finite.
    """
    quiet_libraries(world)
    settings = replace(task.settings, revision=broadcast_object(partial(resolve_commit, task.settings), world))
    with local_main_process_first(world):  # it downloads the model, and reads and tokenizes the CSV into the cache
        model, tokenizer, warnings = load_trained(settings, world.device)
        names: Any = model.config.id2label or {}
        table, part, has_labels = read_rows(task, [str(names[class_id]) for class_id in sorted(names)])
        # `evaluate` needs a class of every row. Its scores are not used.
        with_classes = replace(table, labels=table.labels.clip(0))
        requested = settings.max_length if task.run is not None or "max_length" in task.given else None
        max_length = usable_length(model.config, tokenizer, requested)
        cache_dir = Path(settings.cache_dir) if task.texts is None else None
        rows = tokenize(with_classes, tokenizer, max_length, cache_dir=cache_dir)
        may_share = check_rows(settings.model, model.config, table, rows=rows, to_train=False)
    agree_on_model(model, rows, tokenizer, world=world)
    n_cut = int((lengths_of(rows) == max_length).sum())
    cut = f"{n_cut} reviews have {max_length} tokens, to which longer ones are cut" if n_cut else None
    for line in filter(None, (*warnings, cut, describe_unknown(rows, tokenizer))) if world.is_main_process else ():
        print(f"warning: {settings.model}: {line}", file=sys.stderr)
    # The batches, and with them the logits, are those of a run's evaluation, at any number of ranks.
    eval_set = build_eval_set(
        "rows to predict",
        rows.select(part),
        with_classes.labels[part],
        batches=form_eval_batches(lengths_of(rows)[part], settings.eval_batch_size if may_share else 1),
        collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=settings.pad_to_multiple_of),
        world=world,
    )
    hides = hides_progress(settings.disable_tqdm, world.is_main_process)
    batches: Any = tqdm(eval_set.loader, desc="predicting", unit=" batches", leave=False, disable=hides)
    _, logits = evaluate(model, replace(eval_set, loader=batches), settings, world=world)
    if world.is_main_process:
        write(task, table, part, logits=logits, has_labels=has_labels)


def write(task: Task, table: ReviewTable, part: Indices, *, logits: NDArray[np.float64], has_labels: bool) -> None:
    """Write the predictions, or print those of texts, and print the metrics of the labeled rows."""
    lines = predictions_as_csv(table, part, logits=logits, has_labels=has_labels)
    try:
        if task.output is None:
            text = "".join(lines)
            if sys.stdout.isatty():  # a file or a pipe gets the texts as they are
                text = "\n".join(map(escape_control_characters, text.split("\n")))
            print(text, end="", flush=True)
            return
        if os.path.lexists(task.output):  # `define_task` has checked it at the start
            raise RunError(f"{task.output}: has been created meanwhile: remove it, and start again")
        write_text(task.output, lines)
    except OSError as problem:
        place = task.output or "standard output"
        raise RunError(f"{place} could not be written: {problem.strerror or problem}") from None
    if (encoding := next(iter(table.notes), "")) not in ("", "utf-8-sig"):
        print(escape_control_characters(f"{table.path}: read as {encoding}"), file=sys.stderr)
    for line in describe_dropped(table):
        print(escape_control_characters(f"{table.path}: dropped {line}"))
    known = table.labels[part] >= 0
    if known.any():
        scores = score(logits[known], table.labels[part][known], find_positive_class(task.settings, table.class_names))
        print(labeled("accuracy", scores.describe(table.class_names)))
    print(labeled("predictions", task.output))


# --- the command line ------------------------------------------------------------------------------------------------


def define_task(name: str, texts: list[str], *, part: Part | None, output: str | None) -> Task:
    """Combine the command line with the settings of the run.

    Raises:
        UserError: the run has not finished, a flag is invalid or contradicts another one or the run, there is nothing
            to predict, or the output exists.
    """
    run = find_run(Path(name))
    if part is not None and run is None:
        raise UserError(f"--split {part}: {name} is not the folder of a run")
    given = PROGRAM.parse_given(sys.argv[1:])
    values, recorded = Settings().as_dict(), {}
    if run is not None:
        read_object(run, METRICS)  # which is written last
        recorded = read_object(run, SETTINGS)
        values |= {flag: recorded[flag] for flag in (*OF_PREDICTIONS, *OF_SPLIT) if recorded.get(flag) is not None}
        values["tf32"] &= torch.cuda.is_available() and "use_cpu" not in given  # a CPU has none
    if "label_names" in given and values["label_names"] is not None:
        raise UserError(f"--label_names: the run in {run} was trained with --label_names: remove the flag")
    values |= {flag: value for flag, value in given.items() if flag in values}
    values["model"] = name if run is None else str(run / MODEL_FOLDER)
    if part is None and (unused := [flag for flag in FILES[1:] if flag in given]):
        raise UserError(f"--{unused[0]}: allowed only with --split; to predict other rows, give a file with --csv")
    if part is not None:
        files = {flag: recorded.get(flag) for flag in (*FILES, "encoding")}
        if files["dataset_name"] is not None:
            files["csv"] = None  # recorded as the place of the data set
        values |= files | {flag: given[flag] for flag in files if flag in given}  # if they have moved
    settings = select_precision(Settings(**values))
    reads_a_file = settings.csv is not None or part is not None
    if reads_a_file and texts:
        raise UserError("texts and a CSV exclude each other: remove --csv, --split or the texts")
    if reads_a_file and output is None:
        output = f"{part or settings.csv_path.stem}-predictions.csv"
    path = None if output is None else Path(output)
    if path is not None:
        if os.path.lexists(path):
            raise UserError(f"--output {path}: exists: name another file, or remove it")
        try:
            with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=path.absolute().parent):
                pass  # better now than after all rows are predicted
        except OSError as problem:
            raise UserError(f"--output {path}: cannot be written: {problem.strerror or problem}") from None
    return Task(settings, run, None if reads_a_file else find_texts(texts), part, path, given)


def find_run(folder: Path) -> Path | None:
    """Return the run whose folder this is, or whose model; None if it is another model."""
    if os.path.isfile(folder / SETTINGS.name):  # unlike Path.is_file, False for a name that is too long
        return folder
    run = folder.parent
    # Without the settings of the run, texts would be cut at another length than in training.
    has_files = all(os.path.isfile(run / name) for name in (SETTINGS.name, METRICS.name))
    return run if folder.name == MODEL_FOLDER and has_files else None


def find_texts(texts: list[str]) -> list[str]:
    """Return the texts to predict, from the command line or, without blank lines, from standard input."""
    if rank_and_sizes()[1] > 1:
        raise UserError("texts are predicted by one process: start it without torchrun, or give --csv")
    if not texts and sys.stdin is not None and not sys.stdin.isatty():
        lines = sys.stdin.buffer.read().decode("utf-8-sig", "surrogateescape").split("\n")  # splitlines: also at U+2028
        texts = [line.removesuffix("\r") for line in lines if line.strip()]
    if not texts:
        raise UserError("nothing to predict: give --csv, --split, a text, or texts on standard input")
    if any(text != text.encode("utf-8", "ignore").decode() for text in texts):
        raise UserError("a text is not valid UTF-8")
    if not all(text.strip() for text in texts):
        raise UserError("a text is empty: leave it out")
    return texts


# --- the rows --------------------------------------------------------------------------------------------------------


def read_rows(task: Task, class_names: Sequence[str]) -> tuple[ReviewTable, Indices, bool]:
    """Return the reviews, the positions of those to predict, and whether they have a column of labels."""
    settings = task.settings
    if task.part is not None:
        return *read_rows_of_run(task, task.part), True
    if task.texts is not None:
        source, has_labels = Source(Path("-"), Dataset.from_dict({settings.text_column: task.texts})), False
    else:
        source = open_file(settings.csv_path, Path(settings.cache_dir), settings.encoding)
        has_labels = "label_column" in task.given or settings.label_column in source.table.column_names
    columns = (settings.text_column, settings.label_column if has_labels else None)
    if not has_labels and "positive_class" in task.given:
        raise UserError("--positive_class: only rows with labels have an F1, and these have none: remove the flag")
    table = clean({"train": source}, columns, class_names=class_names, label_names=settings.label_names)
    find_positive_class(settings, table.class_names)  # rejects another one before anything is predicted
    return table, np.arange(len(table), dtype=np.int64), has_labels


def read_rows_of_run(task: Task, part: Part) -> tuple[ReviewTable, Indices]:
    """Return the reviews of a run, and the positions of a part of them.

    Raises:
        UserError: the files have other rows than the run had.
    """
    assert task.run is not None, "define_task has checked it"
    settings = replace(task.settings, train_batch_size=1)  # nothing is trained: any number of rows will do
    table, split, _ = read_and_split(settings, 1, Path(settings.cache_dir))
    if split.fingerprint != read_object(task.run, SPLIT)["fingerprint"]:
        raise UserError(
            f"{task.run}: its files have changed since the run split them; if they have moved, give the new location "
            "with --csv, --validation_file, --test_file or --dataset_name"
        )
    rows: Indices = getattr(split, part)
    if not len(rows):
        raise UserError(f"--split {part}: the run in {task.run} has no such rows")
    return table, rows


if __name__ == "__main__":
    PROGRAM.launch(main)
