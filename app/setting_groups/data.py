"""The settings of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..common.paths import DOWNLOADED_CSV
from ..common.valid import at_least, count, label_names, name_of, number
from .built_in import describe_default
from .field import setting


@dataclass
class DataSettings:
    _argument_group_name = "data"

    csv: str | None = setting(
        None,
        f"file of reviews: a CSV, JSON Lines (.jsonl, .json) or Parquet (.parquet); default: {DOWNLOADED_CSV.name} if "
        "downloaded, otherwise the bundled sample",
        valid=name_of("a file"),
    )
    validation_file: str | None = setting(
        None, "file of published validation rows, as for --csv, which then has no such rows", valid=name_of("a file")
    )
    test_file: str | None = setting(
        None, "file of published test rows, as for --csv, which then has no such rows", valid=name_of("a file")
    )
    dataset_name: str | None = setting(
        None,
        "data set on the Hugging Face Hub, NAME or NAME/CONFIG, or a folder of one, instead of --csv; its splits "
        "train, validation and test are used as published",
        valid=name_of("a data set"),
    )
    on_duplicates_between_parts: Literal["continue", "stop"] = setting(
        "continue",
        "what to do if a text occurs in two of the training, validation and test rows; they are counted and printed",
    )
    text_column: str = setting("review", "column that contains the text", valid=name_of("a column"))
    label_column: str = setting(
        "label", "column that contains the class: two or more distinct integers or strings", valid=name_of("a column")
    )
    label_names: str | None = setting(
        None,
        "names of the classes in the model's config, predictions and reports, such as 0=negative,1=positive; default: "
        "the labels",
        valid=label_names,
    )
    test_size: float = setting(
        0.1,
        "fraction of the rows, between 0 and 1, to hold out as test rows, unless test rows are published",
        valid=number(lambda x: 0 < x < 1, "a fraction of the rows between 0 and 1, such as 0.1"),
    )
    validation_size: float = setting(
        0.0,
        "fraction of the remaining rows to hold out for monitoring and for choosing the best weights, unless "
        "validation rows are published; 0: none",
        valid=at_least(0, below=1, requirement="0 or a fraction of the training rows below 1"),
    )
    max_length: int = setting(
        None,
        "maximum number of tokens per review, including special tokens; longer reviews are truncated; "
        + describe_default("max_length"),
        valid=count(3, "tokens"),
    )
    pad_to_multiple_of: int = setting(
        1,
        "pad batches to a multiple of so many tokens: fewer different lengths, for which kernels may be faster",
        valid=count(1, "tokens"),
    )
    cache_dir: str = setting(
        "runs/cache",
        "folder that caches rows, vocabularies, embeddings and tokens, for all runs; safe to delete",
        valid=name_of("a folder"),
    )
