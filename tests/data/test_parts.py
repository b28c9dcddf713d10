"""Published parts: --validation_file, --test_file and --dataset_name."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pandas as pd
import pytest

from app.common.errors import UserError
from app.data.reviews import ReviewTable, clean
from app.data.sources import open_sources
from app.data.split import Split, count_duplicates, split_reviews
from app.settings import Settings
from app.training.build import ReviewData
from app.training.prepare import check_parts

SIZES = {"train": 20, "validation": 6, "test": 8}


def rows(part: str, n: int) -> pd.DataFrame:
    return pd.DataFrame({"label": [i % 2 for i in range(n)], "review": [f"{part} {i}" for i in range(n)]})


def write(folder: Path, suffix: str = ".csv", **changed: pd.DataFrame) -> dict[str, str]:
    """Write the three files, and return the settings that name them."""
    folder.mkdir(exist_ok=True)
    names = {"train": "csv", "validation": "validation_file", "test": "test_file"}
    for part, n in SIZES.items():
        frame, path = changed.get(part, rows(part, n)), folder / f"{part}{suffix}"
        frame.to_csv(path, index=False) if suffix == ".csv" else frame.to_json(path, orient="records", lines=True)
    return {names[part]: str(folder / f"{part}{suffix}") for part in SIZES}


def read(settings: dict[str, str], cache_dir: Path | None = None) -> ReviewTable:
    return clean(open_sources(Settings(**settings), cache_dir))


def sizes_of(table: ReviewTable) -> dict[str, int]:
    return {part: len(positions) for part, positions in table.parts.items()}


def split(table: ReviewTable) -> Split:
    return split_reviews(table, test_size=0.2, validation_size=0.0, seed=42)


def test_published_parts_are_used_as_they_are_in_any_format(tmp_path):
    table = read(write(tmp_path), tmp_path / "cache")
    assert sizes_of(table) == SIZES
    assert (len(table), table.rows_read, table.path) == (34, 34, tmp_path / "train.csv")
    parts = split(table)
    for part, n in SIZES.items():
        positions = getattr(parts, part)
        assert table.texts.iloc[positions].tolist() == [f"{part} {i}" for i in range(n)]
        assert table.rows[positions].tolist() == list(range(n))  # in its own file
        assert table.labels[positions].tolist() == [i % 2 for i in range(n)]
    again = split_reviews(table, test_size=0.3, validation_size=0.0, seed=42)
    assert again.fingerprint == parts.fingerprint
    for settings in (write(tmp_path / "lines", ".jsonl"), {"dataset_name": str(tmp_path / "lines")}):
        other = read(settings, tmp_path / "cache")
        assert (other.sha256, split(other).fingerprint) == (table.sha256, parts.fingerprint)


@pytest.mark.parametrize("given", ["validation_file", "test_file"])
def test_the_other_part_is_held_out_of_the_training_rows(tmp_path, given):
    settings = write(tmp_path)
    table = read({name: settings[name] for name in ("csv", given)})
    parts = split_reviews(table, test_size=0.2, validation_size=0.25 if given == "test_file" else 0.0, seed=42)
    published, held_out = (
        (parts.validation, parts.test) if given == "validation_file" else (parts.test, parts.validation)
    )
    assert table.texts.iloc[published].str.startswith(given.partition("_")[0]).all()
    assert table.texts.iloc[[*parts.train, *held_out]].str.startswith("train").all()
    assert sorted([*parts.train, *held_out]) == list(range(20))
    assert 4 <= len(held_out) <= 5


def test_a_data_set_without_test_rows_is_split(tmp_path):
    for part in ("train", "validation"):
        rows(part, 20).to_json(tmp_path / f"{part}.jsonl", orient="records", lines=True)
    table = read({"dataset_name": str(tmp_path)})
    parts = split(table)
    assert (len(parts.train), len(parts.validation), len(parts.test)) == (16, 20, 4)


def test_csv_files_of_a_data_set_are_read_like_one_that_csv_names(tmp_path):
    reviews = ["000", "NA", "null", "1e5", "2024-01-01", "True", "", "好"] * 3
    folder = tmp_path / "data"
    folder.mkdir()
    pd.DataFrame({"label": ["007", "1"] * 12, "review": reviews}).to_csv(folder / "train.csv", index=False)
    table, csv = read({"dataset_name": str(folder)}, tmp_path / "cache"), read({"csv": str(folder / "train.csv")})
    assert table.texts.tolist() == csv.texts.tolist() == [text for text in reviews if text]
    assert table.class_names == csv.class_names == ("007", "1")
    assert (table.sha256, table.dropped) == (csv.sha256, csv.dropped)
    time = (folder / "train.csv").stat().st_mtime_ns
    pd.DataFrame({"label": ["007", "1"] * 12, "review": ["ab"] * 24}).to_csv(folder / "train.csv", index=False)
    os.utime(folder / "train.csv", ns=(time, time))  # as `cp -p` does
    assert read({"dataset_name": str(folder)}, tmp_path / "cache").texts[0] == "ab"


def test_a_row_with_too_many_fields_in_a_data_set_is_one_line(tmp_path):
    for part in ("train", "test"):
        rows(part, 20)[["review", "label"]].to_csv(tmp_path / f"{part}.csv", index=False)
    with (tmp_path / "test.csv").open("a") as file:
        file.write("good, clean,1\n")
    with pytest.raises(UserError, match=f"--dataset_name {tmp_path}: .*Expected 2 fields in line 22, saw 3"):
        read({"dataset_name": str(tmp_path)})


def test_a_part_of_a_data_set_may_have_several_files(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    (folder / "train").mkdir(parents=True)
    for i, frame in enumerate((rows("train", 20), rows("train", 4).assign(label="good"))):
        frame.to_csv(folder / "train" / f"{i}.csv", index=False)
    (folder / "test").mkdir()
    rows("test", 3).to_csv(folder / "test" / "0.csv", index=False)
    table = read({"dataset_name": str(folder)})
    assert (sizes_of(table), table.class_names) == ({"train": 24, "test": 3}, ("0", "1", "good"))
    monkeypatch.chdir(folder)
    assert read({"dataset_name": "."}).sha256 == read({"dataset_name": f"{folder}/"}).sha256 == table.sha256


def test_labels_of_tables_may_have_different_types_in_parts_and_chunks(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    many = 10_001  # pandas infers the types of 10,000 rows at once
    for part, n in (("train", many), ("test", 2)):
        frame = rows(part, n).astype({"label": str})
        frame.loc[n - 2 :, "label"] = "good"
        frame.to_csv(folder / f"{part}.tsv", index=False, sep="\t")
    table = read({"dataset_name": str(folder)}, tmp_path / "cache")
    assert table.class_names == ("0", "1", "good")
    assert sizes_of(table) == {"train": many, "test": 2}


def test_options_that_a_data_set_declares_for_its_csv_files_are_applied(tmp_path):
    (tmp_path / "data").mkdir()
    rows("train", 20).to_csv(tmp_path / "data" / "train.csv", index=False)
    configs = "configs:\n- config_name: default\n  data_files: train.csv\n  nrows: 8\n"
    (tmp_path / "data" / "README.md").write_text(f"---\n{configs}---\n")
    assert len(read({"dataset_name": str(tmp_path / "data")})) == 8


def test_compressed_csv_files_of_a_data_set_are_texts(tmp_path):
    reviews = ["000", "NA", "", "好"] * 6
    frame = pd.DataFrame({"label": ["007", "1"] * 12, "review": reviews})
    (tmp_path / "data").mkdir()
    frame.to_csv(tmp_path / "data" / "train.csv.gz", index=False)
    table = read({"dataset_name": str(tmp_path / "data")}, tmp_path / "cache")
    assert table.texts.tolist() == [text for text in reviews if text]
    assert table.class_names == ("007", "1")


@pytest.mark.parametrize("part", ["validation", "test"])
def test_a_size_of_a_part_that_a_data_set_has_is_rejected(tmp_path, part):
    for name in ("train", part):
        rows(name, 20).to_json(tmp_path / f"{name}.jsonl", orient="records", lines=True)
    table = read({"dataset_name": str(tmp_path)})
    data = cast(ReviewData, SimpleNamespace(table=table, split=split(table), duplicates={}))
    settings = Settings(dataset_name=str(tmp_path), **{f"{part}_size": 0.25})
    with pytest.raises(UserError, match=f"--{part}_size 0.25: .* has {part} rows: remove the flag"):
        check_parts(settings, data)
    check_parts(Settings(dataset_name=str(tmp_path)), data)


def test_dropped_rows_are_those_of_their_file(tmp_path):
    table = read(write(tmp_path, test=pd.DataFrame({"label": [1, None, 0], "review": ["a", "b", None]})))
    assert table.dropped == {"no review (test file)": [2], "no label (test file)": [1]}
    assert sizes_of(table) == SIZES | {"test": 1}


def test_texts_in_two_parts_are_counted_and_can_stop_the_run(tmp_path):
    settings = write(tmp_path, test=rows("train", 3))
    table = read(settings)
    counts = count_duplicates(table, split(table))
    assert counts == {"test_in_train": 3, "test_in_validation": 0, "validation_in_train": 0}
    data = cast(ReviewData, SimpleNamespace(table=table, split=split(table), duplicates=counts))
    check_parts(Settings(**settings), data)
    with pytest.raises(UserError, match=r"stop: 3 test reviews also occur in train rows: scores"):
        check_parts(Settings(**settings, on_duplicates_between_parts="stop"), data)


def test_best_weights_need_the_validation_rows_of_a_data_set(tmp_path):
    for part in ("train", "test"):
        rows(part, 20).to_json(tmp_path / f"{part}.jsonl", orient="records", lines=True)
    table = read({"dataset_name": str(tmp_path)})
    data = cast(ReviewData, SimpleNamespace(table=table, split=split(table)))
    with pytest.raises(UserError, match="has no validation rows to choose on: add --validation_size"):
        check_parts(Settings(dataset_name=str(tmp_path), load_best_model_at_end=True), data)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (
            rows("test", 3).replace({"label": {1: 7}}),
            "row 1: label '7' is not a class of {}/train.csv, which has '0', '1'",
        ),
        (rows("test", 3).rename(columns={"label": "stars"}), "no column 'label'; the file has 'stars', 'review'"),
        (rows("test", 0), "has no rows"),
        (pd.DataFrame({"label": [1], "review": [None]}), "no row has both a review ('review') and a label"),
    ],
)
def test_what_is_wrong_with_a_part_is_one_line(tmp_path, test, message):
    with pytest.raises(UserError) as caught:
        read(write(tmp_path, test=test), tmp_path / "cache")
    assert str(caught.value).startswith(f"{tmp_path}/test.csv: {message.format(tmp_path)}")
    assert "\n" not in str(caught.value)


def test_a_data_set_that_cannot_be_loaded_is_one_line(tmp_path):
    rows("test", 5).to_json(tmp_path / "test.jsonl", orient="records", lines=True)
    for name, message in (
        (str(tmp_path), "has no split train, but 'test'"),
        (f"{tmp_path}/config", "BuilderConfig 'config' not found"),
        ("/missing/folder/of/data", "Couldn't find any data file at /missing/folder/of"),
        ("x" * 300, ""),
    ):
        with pytest.raises(UserError) as caught:
            read({"dataset_name": name})
        assert str(caught.value).startswith(f"--dataset_name {name}: {message}")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset_name": "x", "csv": "a.csv"}, "--dataset_name and --csv exclude each other"),
        ({"dataset_name": "x", "test_file": "a.csv"}, "--dataset_name and --test_file exclude each other"),
        ({"test_file": "a.csv"}, "--test_file needs --csv"),
        ({"csv": "a", "test_file": "b", "test_size": 0.2}, "--test_file and --test_size exclude each other"),
        (
            {"csv": "a", "validation_file": "b", "validation_size": 0.2},
            "--validation_file and --validation_size exclude",
        ),
    ],
)
def test_contradictions_are_one_line(settings, message):
    with pytest.raises(UserError, match=message):
        Settings(**settings)


def test_published_validation_rows_choose_the_best_weights():
    assert Settings(csv="a.csv", validation_file="b.csv", load_best_model_at_end=True).may_validate
