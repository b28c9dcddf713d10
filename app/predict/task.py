"""What to predict: the command line combined with the settings of the run, and the rows."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from datasets import Dataset

from ..cli import parse_given, parse_settings
from ..common.errors import UserError
from ..common.terminal import has_piped_input
from ..data.reviews import Indices, ReviewTable, clean, read_reviews
from ..data.sources import Source, files_of, open_file
from ..data.split import split_reviews
from ..distributed.environment import rank_and_sizes
from ..flags import REJECTED_BY_PREDICT, add_predict_flags
from ..program import select_precision
from ..runs.reader import read_object
from ..runs.schema import METRICS, MODEL_FOLDER, SETTINGS, SPLIT
from ..settings import Settings

# Settings of a run that determine its predictions, or the split of its rows.
OF_THE_RUN = (
    *("text_column", "label_column", "label_names", "test_size", "validation_size", "seed"),
    *("max_length", "pad_to_multiple_of"),
    *("attn_implementation", "precision", "tf32", "deterministic", "eval_batch_size", "threads"),
)
MAY_HAVE_MOVED = ("validation_file", "test_file", "dataset_name")
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


def define_task(name: str, texts: list[str], *, part: Part | None, output: str | None) -> Task:
    """Combine the command line with the settings of the run.

    Raises:
        UserError: the run has not finished, a flag is invalid or contradicts another one or the run, there is nothing
            to predict, or the output exists.
    """
    run = find_run(Path(name))
    if part is not None and run is None:
        raise UserError(f"--split {part}: {name} is not the folder of a run")
    settings, names_labels = combine_settings(name, run, part)
    lines = find_texts(texts, reads_a_file=settings.csv is not None or part is not None)
    path = None if lines is not None else Path(f"{part or settings.csv_path.stem}-predictions.csv")
    path = check_output(path if output is None else output)
    return Task(settings, run, lines, part, path, requires_labels=names_labels or part is not None)


def combine_settings(name: str, run: Path | None, part: Part | None) -> tuple[Settings, bool]:
    """Return the settings, by default those of the run, and whether the command line names the label column.

    Raises:
        UserError: the run has not finished, or a flag is invalid or contradicts another one or the run.
    """
    given = parse_given(None, sys.argv[1:], add_predict_flags, rejected=REJECTED_BY_PREDICT)
    defaults = (Settings() if run is None else settings_of_run(run)).as_dict()
    if "label_names" in given and defaults["label_names"] is not None:
        raise UserError(f"--label_names: the run in {run} was trained with --label_names: remove the flag")
    names_labels = "label_column" in given
    values = defaults | {flag: value for flag, value in given.items() if flag in defaults}
    values["model"] = str(run / MODEL_FOLDER) if run else name
    moved = {flag: values.pop(flag) for flag in MAY_HAVE_MOVED if values[flag] is not None}
    settings = select_precision(Settings(**values))
    if moved and part is None:
        raise UserError(
            f"--{next(iter(moved))}: allowed only with --split, if the data have moved since training; to predict "
            "other rows, give a file with --csv"
        )
    if run is not None and part is not None:
        files: dict[str, Any] = files_of_run(run, settings.csv, moved)
        settings = replace(settings, **files)
    return settings, names_labels


def find_texts(arguments: list[str], *, reads_a_file: bool) -> list[str] | None:
    """Return the texts to predict, from the command line or standard input; None for the rows of a file.

    Raises:
        UserError: texts and a file are given, there are several ranks, there are no texts, or one is empty or not valid
            UTF-8.
    """
    if reads_a_file:
        if arguments:
            raise UserError("texts and a CSV exclude each other: remove --csv, --split or the texts")
        return None
    if rank_and_sizes()[1] > 1:
        raise UserError("texts are predicted by one process: start it without torchrun, or give --csv")
    texts = arguments or read_lines()
    if any(text != text.encode("utf-8", "ignore").decode() for text in texts):
        raise UserError("a text is not valid UTF-8")
    if not all(text.strip() for text in texts):
        raise UserError("a text is empty: leave it out")
    return texts


def check_output(output: str | Path | None) -> Path | None:
    """Return the path of the output; None to print the predictions.

    Raises:
        UserError: it exists, or its folder does not.
    """
    if output is None:
        return None
    if output == "":
        raise UserError("--output is empty: must name a file")
    path = Path(output)
    if os.path.lexists(path):
        raise UserError(f"{path}: exists: name another file with --output, or remove it")
    if not os.path.isdir(path.absolute().parent):
        raise UserError(f"--output {path}: its folder does not exist")
    return path


def files_of_run(run: Path, csv: str | None, moved: Mapping[str, str]) -> dict[str, str | None]:
    """Return the settings that name the data of a run, or the places to which it has moved.

    Args:
        moved: those of `MAY_HAVE_MOVED` that are given.

    Raises:
        UserError: a file is given that the run did not have.
    """
    recorded = read_object(run, SETTINGS)
    names = ("csv", *MAY_HAVE_MOVED)
    used = {name: recorded.get(name) for name in names}
    if used["dataset_name"] is not None:
        used["csv"] = None
    now = {**moved, **({} if csv is None else {"csv": csv})}
    if unknown := [name for name in now if used[name] is None]:
        used_flags = [f"--{name}" for name in names if used[name] is not None]
        raise UserError(
            f"--{unknown[0]}: the run in {run} was trained with {' and '.join(used_flags)} instead: remove the flag"
        )
    return used | now


def find_run(folder: Path) -> Path | None:
    """Return the run whose folder this is, or whose model; None if it is another model."""
    if os.path.isfile(folder / SETTINGS.name):  # unlike Path.is_file, False for a name that is too long
        return folder
    run = folder.parent
    # Without the settings of the run, texts would be cut at another length than in training.
    has_files = all(os.path.isfile(run / name) for name in (SETTINGS.name, METRICS.name))
    return run if folder.name == MODEL_FOLDER and has_files else None


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
        lines[:1] = [line.removeprefix("\ufeff") for line in lines[:1]]
    except UnicodeDecodeError:
        raise UserError("standard input: is not valid UTF-8") from None
    if not (texts := [line for line in lines if line.strip()]):
        raise UserError("nothing to predict: give --csv, --split, a text, or texts on standard input")
    return texts


def read_table(task: Task, class_names: Sequence[str]) -> tuple[ReviewTable, bool]:
    """Return the reviews, and whether they have a column of labels.

    Raises:
        UserError: the CSV cannot be used, or has a label that is not a class of the model.
    """
    settings = task.settings
    if task.texts is not None:
        texts = {"train": Source(Path("-"), Dataset.from_dict({settings.text_column: task.texts}))}
        columns = (settings.text_column, None)
        return clean(texts, columns, class_names=class_names, label_names=settings.label_names), False
    cache_dir = Path(settings.cache_dir)
    has_labels = (
        task.requires_labels or settings.label_column in open_file(settings.csv_path, cache_dir).table.column_names
    )
    table = read_reviews(
        settings.csv_path if task.part is None else files_of(settings.as_dict()),
        settings.text_column,
        settings.label_column if has_labels else None,
        # The run's split had the rows with a label only.
        class_names=class_names if task.part is None else None,
        label_names=settings.label_names,
        cache_dir=cache_dir,
    )
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
        used = {flag: value for flag in ("csv", *MAY_HAVE_MOVED) if (value := getattr(settings, flag)) is not None}
        flags = " and ".join(f"--{flag}" for flag in used)
        raise UserError(
            f"{' or '.join(used.values())}: has changed since the run in {task.run} split it; if it has moved, give "
            f"the new location with {flags}"
        )
    part: Indices = getattr(split, task.part)
    if not len(part):
        raise UserError(f"--split {task.part}: the run in {task.run} has no such rows")
    return part
