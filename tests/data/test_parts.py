"""Published parts: --validation_file, --test_file and --dataset_name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from app.common.errors import UserError
from app.data.reviews import ReviewTable, clean
from app.data.sources import open_sources
from app.data.split import count_duplicates, split_reviews
from app.settings import Settings
from app.training.prepare import check_parts

SIZES = {"train": 20, "validation": 6, "test": 8}
FLAGS = {"train": "csv", "validation": "validation_file", "test": "test_file"}


def rows(part: str, n: int) -> pd.DataFrame:
    return pd.DataFrame({"label": [i % 2 for i in range(n)], "review": [f"{part} {i}" for i in range(n)]})


def write(folder: Path, name: str = "{}.csv", parts: tuple[str, ...] = tuple(SIZES), **changed: pd.DataFrame) -> Path:
    """Write a file of each part. The ending of the name is its format."""
    for part in parts:
        frame, path = changed.get(part, rows(part, SIZES[part])), folder / name.format(part)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            frame.to_json(path, orient="records", lines=True)
        else:
            frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    return folder


def files(folder: Path, *parts: str) -> dict[str, str]:
    """Return the settings that name the CSV files of these parts, by default all."""
    return {FLAGS[part]: str(folder / f"{part}.csv") for part in parts or SIZES}


def read(settings: dict[str, str], cache_dir: Path | None = None) -> ReviewTable:
    return clean(open_sources(Settings(**settings), cache_dir))


def split(table: ReviewTable, test_size: float = 0.2, validation_size: float = 0.0) -> dict[str, Any]:
    """Return the texts of each part, and the fingerprint."""
    parts = split_reviews(table, test_size=test_size, validation_size=validation_size, seed=42)
    texts = {part: table.texts.iloc[getattr(parts, part)].tolist() for part in SIZES}
    return texts | {"fingerprint": parts.fingerprint}


def sizes_of(table: ReviewTable) -> dict[str, int]:
    return {part: len(positions) for part, positions in table.parts.items()}


def test_published_parts_are_used_as_they_are_in_any_format(tmp_path, monkeypatch):
    table = read(files(write(tmp_path)), tmp_path / "cache")
    assert (sizes_of(table), table.rows_read, table.path) == (SIZES, 34, tmp_path / "train.csv")
    parts = split(table)
    for part, n in SIZES.items():
        assert parts[part] == rows(part, n).review.tolist()
        assert table.rows[table.parts[part]].tolist() == list(range(n))  # in its own file
        assert table.labels[table.parts[part]].tolist() == rows(part, n).label.tolist()
    assert split(table, test_size=0.3) == parts, "a size that has no effect is part of the fingerprint"
    monkeypatch.chdir(write(tmp_path / "lines", "{}.jsonl"))
    for name in (".", f"{tmp_path}/lines/"):
        other = read({"dataset_name": name})
        assert (other.sha256, split(other)) == (table.sha256, parts)


@pytest.mark.parametrize(("published", "held_out"), [("validation", "test"), ("test", "validation")])
@pytest.mark.parametrize("as_data_set", [False, True])
def test_the_other_part_is_held_out_of_the_training_rows(tmp_path, published, held_out, as_data_set):
    folder = write(tmp_path / "data", parts=("train", published))
    table = read({"dataset_name": str(folder)} if as_data_set else files(folder, "train", published))
    parts = split(table, validation_size=0.25)
    assert parts[published] == rows(published, SIZES[published]).review.tolist()
    assert sorted(parts["train"] + parts[held_out]) == sorted(rows("train", 20).review)
    assert len(parts[held_out]) == {"test": 4, "validation": 5}[held_out]


def test_dropped_rows_are_those_of_their_file(tmp_path):
    table = read(files(write(tmp_path, test=pd.DataFrame({"label": [1, None, 0], "review": ["a", "b", None]}))))
    assert table.dropped == {"no review (test file)": [2], "no label (test file)": [1]}
    assert sizes_of(table) == SIZES | {"test": 1}


# --- folders ---


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "tsv"])
def test_csv_files_of_a_data_set_are_read_like_one_that_csv_names(tmp_path, ending):
    texts = ["000", "NA", "null", "1e5", "2024-01-01", "", "b", "c"] * 1_251
    # pandas infers the types of 10,000 rows at once, and labels may look like numbers in some of them only.
    frame = pd.DataFrame({"label": ["007", "1"] * 5_000 + ["good"] * 8, "review": texts})
    for i, part_of_rows in enumerate((frame[:6], frame[6:])):
        folder = write(tmp_path / "data", f"{{}}/{i}.{ending}", parts=("train",), train=part_of_rows)
    table = read({"dataset_name": str(folder)}, tmp_path / "cache")
    csv = read(files(write(tmp_path, parts=("train",), train=frame), "train"))
    assert table.texts.tolist() == csv.texts.tolist() == [text for text in texts if text]
    assert table.class_names == csv.class_names == ("007", "1", "good")
    assert (table.dropped, table.sha256) == (csv.dropped, csv.sha256)


# --- mistakes ---


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (rows("test", 3).replace({"label": {1: 7}}), "row 1: label '7' is not a class of"),
        (rows("test", 3).rename(columns={"label": "stars"}), "no column 'label'; the file has 'stars', 'review'"),
        (rows("test", 0), "has no rows"),
        (pd.DataFrame({"label": [1], "review": [None]}), "no row has both a review ('review') and a label"),
    ],
)
def test_what_is_wrong_with_a_part_is_one_line(tmp_path, test, message):
    with pytest.raises(UserError) as caught:
        read(files(write(tmp_path, test=test)), tmp_path / "cache")
    assert str(caught.value).startswith(f"{tmp_path}/test.csv: {message}")
    assert len(str(caught.value).splitlines()) == 1


def test_a_data_set_that_cannot_be_loaded_is_one_line(tmp_path):
    no_train, too_many_fields = write(tmp_path / "a", parts=("test",)), write(tmp_path / "b")
    with (too_many_fields / "test.csv").open("a") as file:
        file.write("1,good, clean\n")
    for name, message in (
        (f"{no_train}", "no split train"),
        (f"{no_train}/config", "'config'"),
        (f"{too_many_fields}", "line 10"),
        ("/missing/folder/of/data", "/missing/folder/of"),
        ("x" * 300, ""),
    ):
        with pytest.raises(UserError) as caught:
            read({"dataset_name": name})
        assert str(caught.value).startswith(f"--dataset_name {name}: ")
        assert message in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset_name": "x", "csv": "a.csv"}, "--dataset_name and --csv"),
        ({"dataset_name": "x", "test_file": "a.csv"}, "--dataset_name and --test_file"),
        ({"test_file": "a.csv"}, "--test_file needs --csv"),
        ({"csv": "a", "test_file": "b", "test_size": 0.2}, "--test_file and --test_size"),
        ({"csv": "a", "validation_file": "b", "validation_size": 0.2}, "--validation_file and --validation_size"),
    ],
)
def test_contradictions_are_one_line(settings, message):
    with pytest.raises(UserError, match=message):
        Settings(**settings)


@pytest.mark.parametrize(
    ("parts", "changes", "message"),
    [
        (("validation",), {"validation_size": 0.25}, "--validation_size 0.25: .* has validation rows: remove the flag"),
        (("test",), {"test_size": 0.25}, "--test_size 0.25: .* has test rows: remove the flag"),
        (("test",), {"load_best_model_at_end": True}, "has no validation rows to choose on: add --validation_size"),
        (("test",), {"on_duplicates_between_parts": "stop"}, "stop: 8 test reviews also occur in train rows"),
    ],
)
def test_settings_that_do_not_fit_the_parts_of_a_data_set_are_rejected(tmp_path, parts, changes, message):
    folder = write(tmp_path / "data", parts=("train", *parts), test=rows("train", 8))
    table = read({"dataset_name": str(folder)})
    parts_of_table = split_reviews(table, test_size=0.2, validation_size=0.0, seed=42)
    duplicates = count_duplicates(table, parts_of_table)
    data: Any = SimpleNamespace(table=table, split=parts_of_table, duplicates=duplicates)  # what is checked
    check_parts(Settings(dataset_name=str(folder)), data)
    with pytest.raises(UserError, match=message):
        check_parts(Settings(dataset_name=str(folder), **changes), data)


def test_published_validation_rows_choose_the_best_weights():
    assert Settings(csv="a.csv", validation_file="b.csv", load_best_model_at_end=True).may_validate
