"""Load a data set from the Hugging Face Hub, or a folder of one, with the library `datasets`."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import UserError, shorten
from .csv_checks import hash_file, list_names, readable

if TYPE_CHECKING:
    from datasets import DatasetDict


@dataclass(frozen=True)
class HubDataset:
    """A data set on the Hugging Face Hub: `NAME` or `NAME/CONFIG`, or a folder of one."""

    name: str


def load_hub_dataset(name: str, cache_dir: Path | None) -> DatasetDict:
    """Load all splits of a data set, from the Hub or a folder, or from the cache of `datasets`.

    Raises:
        UserError: There is none of this name, it cannot be loaded, or it has no split `train`.
    """
    # A name has one part or, mostly, two: owner/name. So a config may follow both.
    base, _, config = name.rpartition("/")
    problems: list[Exception] = []
    candidates: list[tuple[str, str | None]] = [(name, None), *([(base, config)] if base else [])]
    if base and not Path(name).is_dir() and (Path(base).is_dir() or name.count("/") > 1):
        del candidates[0]  # a name on the Hub has at most two parts
    for path, config_name in candidates:
        if not Path(path).is_dir() and (path.startswith((".", "~")) or Path(path).is_absolute()):
            raise UserError(f"--dataset_name {name}: there is no such folder")
        try:
            splits = _load(path, config_name, cache_dir)
        except UserError:
            raise
        except Exception as error:  # the errors of `datasets`, Arrow and pandas have no common class
            problems.append(error)
            continue
        if "train" not in splits:
            raise UserError(f"--dataset_name {name}: has no split train, but {list_names(list(splits))}")
        return splits
    problem = first_line(problems[0])
    if Path(base).is_dir() and not Path(name).is_dir():
        raise UserError(f"--dataset_name {name}: is no folder, and no config of {base}: {problem}") from problems[0]
    raise UserError(f"--dataset_name {name}: cannot be loaded: {problem}") from problems[0]


def _load(path: str, config: str | None, cache_dir: Path | None) -> DatasetDict:
    """Load a data set. Columns of CSV files are texts, as in a file that `--csv` names."""
    import datasets

    with tempfile.TemporaryDirectory() as temporary, quiet_datasets():
        folder = Path(temporary) if cache_dir is None else cache_dir / "datasets"
        if cache_dir is not None and Path(path).is_dir():
            # `datasets` recognizes files by their times, which are the same for other content after `cp -p`.
            folder /= _hash_folder(Path(path))[:32]
        options: dict[str, Any] = {"cache_dir": str(folder), "keep_in_memory": cache_dir is None}
        splits = datasets.load_dataset(path, config, **options)
        table = next(iter(splits.values()))
        if table.info.builder_name == "csv":  # pandas has read 000 as 0, and NA as missing
            text = datasets.Value("string")
            features = {
                column: feature if isinstance(feature, datasets.ClassLabel) else text
                for column, feature in table.features.items()
            }
            options |= {"features": datasets.Features(features), "keep_default_na": False, "na_values": [""]}
            splits = datasets.load_dataset(path, config, **options)
    return splits


def _hash_folder(folder: Path) -> str:
    digest = hashlib.sha256()
    with readable(folder):
        files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        digest.update(f"{path.relative_to(folder)}\0{hash_file(path)}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def first_line(error: BaseException) -> str:
    """Return the first line of the error's cause, which says more than an error that `datasets` raises for it."""
    return shorten(next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__), 200)


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
