"""Load files and data sets with the library `datasets`, and say in one line what is wrong with them."""

from __future__ import annotations

import glob
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..common.errors import UserError, shorten
from .csv_checks import hash_file, hash_json, list_names, readable

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


MOST_BRACKETS = 500  # open at once in a line of JSON: at some more, Arrow's parser would crash the process
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"')

# Of each split, its table or the paths of its CSV files.
Splits: TypeAlias = "Mapping[str, Dataset | tuple[Path, ...]]"


@dataclass(frozen=True)
class HubDataset:
    """A data set on the Hugging Face Hub: `NAME` or `NAME/CONFIG`, or a folder of one."""

    name: str


# The imports of `datasets` are in the functions: a CSV, --help and the checks before torch is imported need none.

# --- a file ----------------------------------------------------------------------------------------------------------


def load_file(path: Path, builder: str, cache_dir: Path | None) -> Dataset:
    """Load a file with a builder of `datasets`, `json` or `parquet`.

    Raises:
        UserError: It is empty, or cannot be read.
    """
    import datasets

    with readable(path):
        if not path.stat().st_size:
            raise UserError(f"{path}: is empty; it needs rows")
    if builder == "json":
        _check_nesting(path)
    with tempfile.TemporaryDirectory() as temporary, quiet_datasets():
        # `datasets` recognizes a file by its path and time, which are the same for other content after `cp -p`.
        folder = temporary if cache_dir is None else str(cache_dir / "datasets" / hash_file(path)[:32])
        try:
            return datasets.load_dataset(
                builder,
                data_files=glob.escape(str(path.absolute())),
                split="train",
                cache_dir=folder,
                keep_in_memory=cache_dir is None,
            )
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror or first_line(error)}") from error
        except Exception as error:  # the errors of `datasets`, Arrow and json have no common class
            problem = find_json_problem(path) if builder == "json" else _find_parquet_problem(path)
            kind = "JSON" if builder == "json" else "Parquet"
            raise UserError(f"{path}: {problem or f'is not valid {kind}: {first_line(error)}'}") from error


def _check_nesting(path: Path) -> None:
    """Raise `UserError` if JSON is nested so deeply that Arrow's parser would crash the process."""
    with readable(path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.count(b"[") + line.count(b"{") <= MOST_BRACKETS:
                continue
            depth = 0
            for bracket in re.findall(rb"[\[\]{}]", _STRING.sub(b"", line)):
                depth += 1 if bracket in b"[{" else -1
                if depth > MOST_BRACKETS:
                    raise UserError(f"{path}: line {number}: is nested too deeply")


def find_json_problem(path: Path) -> str | None:
    """Return why a JSON file cannot be used, with the line if it is JSON Lines; None if the cause is not known."""
    n_rows = n_columns = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if number == 1 and line.lstrip().startswith(b"["):  # a JSON array
                return "has no rows" if line.strip() == b"[]" else None
            try:
                row = json.loads(line)
            except UnicodeDecodeError:
                return f"line {number}: is not valid UTF-8"
            except ValueError as error:
                return f"line {number}: is not valid JSON: {first_line(error)}"
            if not isinstance(row, dict):
                return f'line {number}: is not a JSON object such as {{"review": "…", "label": 1}}'
            n_rows, n_columns = n_rows + 1, max(n_columns, len(row))
    if not n_rows:
        return "has no rows"
    return None if n_columns else "no row has a column"


def _find_parquet_problem(path: Path) -> str | None:
    """Return the problem of a Parquet file without rows, for which the error of `datasets` is about something else."""
    import pyarrow.parquet

    with suppress(pyarrow.ArrowException):
        metadata = pyarrow.parquet.read_metadata(path)
        if not metadata.num_rows:
            return f"has columns ({list_names(metadata.schema.names)}) but no rows"
    return None


# --- a data set ------------------------------------------------------------------------------------------------------


def load_splits(name: str, cache_dir: Path | None) -> Splits:
    """Load all splits of a data set, from the Hub or a folder, or from the cache of `datasets`.

    Returns:
        The table of each split or, if it consists of CSV files in a folder, their paths: `datasets` would infer types
        and accept malformed files.

    Raises:
        UserError: There is none of this name, it cannot be loaded, or it has no split `train`.
    """
    # NAME may be NAME/CONFIG, and a NAME on the Hub is mostly owner/name. So the whole name is tried first, unless it
    # cannot be one: its parent is a local folder, or it has more than two parts.
    whole = name.rstrip("/") or name
    base, _, config = whole.rpartition("/")
    problems: list[Exception] = []
    candidates: list[tuple[str, str | None]] = [(whole, None), *([(base, config)] if base else [])]
    if base and not os.path.isdir(whole) and (os.path.isdir(base) or whole.count("/") > 1):
        del candidates[0]
    folder = cache_dir and cache_dir / "datasets"
    for path, config_name in candidates:
        if not os.path.isdir(path) and path.startswith((".", "~", "/")):
            hint = ": ~ is not expanded here, give the complete path" if path.startswith("~") else ""
            raise UserError(f"--dataset_name {name}: there is no such folder{hint}")
        try:
            splits: Splits = (_load_folder if os.path.isdir(path) else _load)(path, config_name, folder)
        except UserError:
            raise
        except Exception as error:  # as in load_file
            problems.append(error)
            continue
        if "train" not in splits:
            raise UserError(f"--dataset_name {name}: has no split train, but {list_names(list(splits))}")
        return splits
    problem = first_line(problems[0])
    if os.path.isdir(base) and not os.path.isdir(name):
        problem = f"is neither a folder nor a config of {base}: {problem}"
        raise UserError(f"--dataset_name {name}: {problem}") from problems[0]
    raise UserError(f"--dataset_name {name}: cannot be loaded: {problem}") from problems[0]


def _load_folder(path: str, config: str | None, cache_dir: Path | None) -> Splits:
    """Load a data set from a folder; if it consists of plain CSV files, return their paths by split."""
    import datasets

    path = os.path.abspath(path)  # `datasets` takes the data set's name from it, and . has none
    with tempfile.TemporaryDirectory() as temporary, quiet_datasets():
        builder = datasets.load_dataset_builder(path, config, cache_dir=temporary)
        found: Mapping[Any, list[str]] = builder.config.data_files or {}
        files = {str(split): tuple(map(Path, of_split)) for split, of_split in found.items()}
        all_files = [file for of_split in files.values() for file in of_split]
        if builder.name == "csv" and all(file.suffix == ".csv" for file in all_files):
            options, defaults = builder.config, type(builder.config)()
            if options.pd_read_csv_kwargs == defaults.pd_read_csv_kwargs:  # README.md sets none
                return files
        if builder.name == "json":
            for file in all_files:
                _check_nesting(file)
    # `datasets` recognizes files by their times, which are the same for other content after `cp -p`.
    tables: Splits = _load(path, config, cache_dir and cache_dir / _hash_files(Path(path), all_files)[:32])
    return tables


def _load(path: str, config: str | None, cache_dir: Path | None) -> DatasetDict:
    """Load a data set. CSV columns are read as strings, as for `--csv`, unless README.md declares them as classes."""
    import datasets
    from datasets.exceptions import DatasetGenerationError

    with tempfile.TemporaryDirectory() as temporary, quiet_datasets():
        folder = temporary if cache_dir is None else str(cache_dir)
        options: dict[str, Any] = {"cache_dir": folder, "keep_in_memory": cache_dir is None}
        try:
            # Also for CSV files: without a network, the cache is found only by the same arguments.
            splits = datasets.load_dataset(path, config, **options)
            table = next(iter(splits.values()))
            columns, is_csv = table.features, table.info.builder_name == "csv"
        except DatasetGenerationError:  # such as a label that is no number, after 10,000 that are
            builder = datasets.load_dataset_builder(path, config, cache_dir=folder)
            if builder.name != "csv":
                raise
            row = next(iter(next(iter(builder.as_streaming_dataset().values()))))
            columns, is_csv = dict.fromkeys(row) | (builder.info.features or {}), True
        if is_csv:  # pandas reads 000 as 0, and NA as missing
            text, label = datasets.Value("string"), datasets.ClassLabel
            features = {name: column if isinstance(column, label) else text for name, column in columns.items()}
            options |= {"features": datasets.Features(features), "keep_default_na": False, "na_values": [""]}
            splits = datasets.load_dataset(path, config, **options)
    return splits


def _hash_files(folder: Path, files: Sequence[Path]) -> str:
    """Return the SHA-256 of the data files of a folder and of its README.md, whose metadata describe them."""
    readme = folder / "README.md"
    paths = [*files, *([readme] if readme.is_file() else [])]
    return hash_json([(os.path.relpath(path, folder), hash_file(path)) for path in paths])


def first_line(error: BaseException) -> str:
    """Return the first line of an error or of its cause, which is often the more precise one.

    A line that only says that the data set could not be generated is left out.
    """
    lines = [line for line in str(error.__cause__ or error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("An error occurred while generating the dataset"):
        del lines[0]
    return shorten(lines[0] if lines else type(error).__name__, 200)


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Keep `datasets` from drawing progress bars, and it and its HTTP client from logging what they also raise."""
    import datasets

    disabled, hides_bars = logging.root.manager.disable, datasets.are_progress_bars_disabled()
    logging.disable(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logging.disable(disabled)
        if not hides_bars:
            datasets.enable_progress_bars()
