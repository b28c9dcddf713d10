"""Files through `datasets`: every format gives the same table, the cache goes by content, a mistake is one line."""

from __future__ import annotations

import os
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from helpers.reviews import read_reviews

from app.common.errors import UserError
from app.data.reviews import ReviewTable
from app.data.sources import open_sources
from app.data.split import split_reviews
from app.settings import Settings

ROWS = pd.DataFrame(
    {
        "label": [1, 0] * 10,
        "review": [f'好 "{i}", 很好\nNA' if i % 3 else f"NA{i}" for i in range(18)] + [None, "  "],
    }
)


GOOD = '{"review": "a", "label": 1}\n'


def write(frame: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_json(path, orient="records", lines=path.suffix == ".jsonl", force_ascii=False)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "ROWS.Parquet", "[ab]*.jsonl"])
@pytest.mark.parametrize("cached", [True, False])
def test_the_same_rows_in_another_format_are_the_same_table(tmp_path, name, cached):
    cache = tmp_path / "cache" if cached else None
    csv, other = read_reviews(write(ROWS, tmp_path / "rows.csv"), cache_dir=cache), tmp_path / name
    if other.suffix == ".Parquet":
        ROWS.to_parquet(other)
    else:
        write(ROWS, other)
    table = read_reviews(other, cache_dir=cache)
    assert (table.path, table.sha256, table.rows_read) == (other, csv.sha256, 20)
    assert table.dropped == csv.dropped == {"no review": [18, 19]}
    assert table.texts.tolist() == csv.texts.tolist() == ROWS.review[:18].tolist()
    assert table.labels.tolist() == csv.labels.tolist()
    assert table.rows.tolist() == csv.rows.tolist()
    assert table.class_names == ("0", "1")
    splits = [split_reviews(rows, test_size=0.2, validation_size=0.2, seed=1) for rows in (csv, table)]
    assert splits[0].fingerprint == splits[1].fingerprint


# --- the cache ---


def contents(table: ReviewTable) -> list[object]:
    facts = [table.sha256, table.rows_read, table.dropped, table.class_names]
    return [*facts, table.rows.tolist(), table.labels.tolist(), table.texts.tolist()]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_file_that_has_changed_is_read_again(tmp_path, suffix):
    path, cache = write(ROWS, tmp_path / f"rows{suffix}"), tmp_path / "cache"
    before = read_reviews(path, cache_dir=cache)
    assert contents(before) == contents(read_reviews(path)) == contents(read_reviews(path, cache_dir=cache))
    time = path.stat().st_mtime_ns
    write(ROWS.assign(review=ROWS.review.str.replace("NA", "zw")), path)
    os.utime(path, ns=(time, time))  # as `cp -p` does
    after = read_reviews(path, cache_dir=cache)
    assert (before.texts[0], after.texts[0]) == ("NA0", "zw0")
    assert before.sha256 != after.sha256


def test_cached_reviews_are_mapped_not_copied(review_csv, tmp_path):
    path, cache = review_csv(2_000), tmp_path / "cache"
    path.write_text(path.read_text("utf-8").replace("\n", "\n1,\n", 1), "utf-8")  # a row that is dropped
    read_reviews(path, cache_dir=cache)
    before = pa.total_allocated_bytes()
    table = read_reviews(path, cache_dir=cache)
    assert (len(table), table.dropped) == (2_000, {"no review": [0]})
    assert table.texts_of(np.arange(0, 2_000, 100)).tolist() == table.texts.tolist()[::100]
    assert pa.total_allocated_bytes() - before < len("".join(table.texts)) / 2


def test_a_cache_folder_that_cannot_be_used_is_reported(review_csv, mount):
    path = review_csv(5_000)
    for options, reason in (("size=64k", "No space left on device"), ("ro", "Read-only file system")):
        cache = mount(options)
        with pytest.raises(UserError, match=reason):
            read_reviews(path, cache_dir=cache)
        assert not list(cache.rglob("*.arrow"))


# --- JSON and Parquet ---


def test_a_missing_number_of_parquet_is_a_missing_label(tmp_path):
    labels = pa.array([0.0, 1.0, float("nan")] * 4)  # not a null, as pandas would write it
    pyarrow.parquet.write_table(pa.table({"review": ["好"] * 12, "label": labels}), tmp_path / "rows.parquet")
    table = read_reviews(tmp_path / "rows.parquet")
    assert table.class_names == ("0", "1")
    assert len(table) == 8


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("owner/name", [("owner/name", None)]),
        ("owner/name/config", [("owner/name", "config")]),
        ("imdb", [("imdb", None)]),
    ],
)
def test_a_data_set_on_the_hub_may_be_followed_by_a_config(monkeypatch, tmp_path, name, calls):
    tried = []

    def load(path, name, **_):
        tried.append((path, name))
        raise ConnectionError("no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=f"--dataset_name {name}: no network"):
        open_sources(Settings(dataset_name=name))
    assert tried == calls


def test_labels_may_be_texts_numbers_or_missing(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"review": "a", "label": 1}\n{"review": "b", "label": "x"}\n{"review": "c"}\n')
    table = read_reviews(path)
    assert (table.class_names, table.dropped) == (("1", "x"), {"no label": [2]})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            GOOD + '{"review": "b", label: 0}\n',
            "JSON parse error: Missing a name for object member. in row 1",
        ),
        ("a.jsonl", GOOD + '{"review": "b"', "JSON parse error: Missing a comma or '}'"),
        ("a.jsonl", GOOD + "\n[1]\n", "JSON parse error: Column() changed from object to array in row 1"),
        ("a.jsonl", GOOD.encode() + b'{"review": "\xff", "label": 0}\n', "column 'review': "),
        ("a.jsonl", GOOD + '{"review": "\\ud800", "label": 0}\n', "JSON parse error: "),
        ("a.json", "[" + GOOD, "Unexpected character found when decoding array value"),
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", "\n\n", "has no rows"),
        ("a.jsonl", "{}\n{}\n", "has no rows"),
        ("a.json", "[]\n", "has no rows"),
        ("a.jsonl", '{"text": "a", "label": 1}\n', "no column 'review'; the file has 'text', 'label'"),
        ("a.jsonl", '{"review": ["a"], "label": 1}\n', "row 0, column 'review': is neither a text nor a number"),
        ("a.jsonl", GOOD * 5, "column 'label' has only one class, '1'"),
        ("a.parquet", "no Parquet file", "Parquet magic bytes not found"),
        ("a.xlsx", b"PK\x03\x04\xff\xff\0\0", "is neither UTF-8 nor GB18030"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        read_reviews(path, cache_dir=tmp_path / "cache")
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_a_damaged_parquet_file_and_one_without_rows(tmp_path):
    path = write(ROWS, tmp_path / "rows.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"rows\.parquet: .*this is not a parquet file"):
        read_reviews(path)
    with pytest.raises(UserError, match=r"empty\.parquet: BatchSize must be greater than 0"):
        read_reviews(write(ROWS[:0], tmp_path / "empty.parquet"))
