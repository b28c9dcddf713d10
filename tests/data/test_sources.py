"""Files through `datasets`: every format gives the same table, the cache goes by content, a mistake is one line."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from unittest.mock import Mock

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from helpers.reviews import read_reviews

from app.common.errors import UserError
from app.data.reviews import ReviewTable, clean
from app.data.sources import open_sources
from app.data.split import split_reviews
from app.settings import Settings

REVIEWS = [f'好 "{i}", 很好\nNA' if i % 3 else f"NA{i}" for i in range(18)]
ROWS = pd.DataFrame({"label": [1, 0] * 10, "review": [*REVIEWS, None, "  "]})


def write(frame: pd.DataFrame, path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix.lower() == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_json(path, orient="records", lines=path.suffix == ".jsonl", force_ascii=False)
    return path


def content(table: ReviewTable) -> list[object]:
    facts = [table.sha256, table.rows_read, table.dropped, table.class_names]
    return [*facts, table.rows.tolist(), table.labels.tolist(), table.texts.tolist()]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "ROWS.Parquet", "[ab]*.jsonl"])
@pytest.mark.parametrize("cached", [True, False])
def test_the_same_rows_in_another_format_are_the_same_table(tmp_path, name, cached):
    cache = tmp_path / "cache" if cached else None
    csv = read_reviews(write(ROWS, tmp_path / "rows.csv"), cache_dir=cache)
    table = read_reviews(write(ROWS, tmp_path / name), cache_dir=cache)
    assert content(table) == content(csv)
    assert table.texts.tolist() == REVIEWS
    splits = [split_reviews(rows, test_size=0.2, validation_size=0.2, seed=1) for rows in (csv, table)]
    assert splits[0].fingerprint == splits[1].fingerprint


@pytest.mark.parametrize(
    ("labels", "class_names", "dropped"),
    [
        # NaN is not a null, as pandas would write it.
        (pa.array([0.0, 1.0, float("nan")]), ("0", "1"), {"no label": [2]}),
        (pa.array(["x", None, "1"]), ("1", "x"), {"no label": [1]}),
        (pa.array([True, False, True]), ("False", "True"), {}),
        ([1, "x", None], ("1", "x"), {"no label": [2]}),  # of a JSON Lines file
    ],
)
def test_labels_of_any_type_are_classes_and_what_is_missing_is_dropped(tmp_path, labels, class_names, dropped):
    if isinstance(labels, list):
        path = write(pd.DataFrame({"review": "好", "label": labels}, dtype=object), tmp_path / "rows.jsonl")
    else:
        path = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pa.table({"review": ["好"] * 3, "label": labels}), path)
    table = read_reviews(path)
    assert (table.class_names, table.dropped) == (class_names, dropped)


@pytest.mark.parametrize("flag", ["csv", "dataset_name"])
def test_reading_files_of_this_machine_asks_no_other(tmp_path, monkeypatch, flag):
    path = write(ROWS, tmp_path / "folder" / "train.csv")
    lookup = Mock(side_effect=OSError("no network"))
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    settings = Settings(**{flag: str(path if flag == "csv" else path.parent)})
    assert len(clean(open_sources(settings, tmp_path / "cache"))) == len(REVIEWS)
    lookup.assert_not_called()


# --- the cache ---


@pytest.mark.parametrize(
    "name", ["rows.csv", "rows.jsonl", "rows.parquet", pytest.param("folder/train.csv", id="data_set")]
)
def test_what_has_changed_is_read_again_even_if_its_time_is_the_same(tmp_path, name):
    path = write(ROWS, tmp_path / name)
    settings = Settings(csv=str(path)) if name.startswith("rows") else Settings(dataset_name=str(path.parent))

    def read(cache: Path | None) -> ReviewTable:
        return clean(open_sources(settings, cache))

    before = read(tmp_path / "cache")
    assert content(before) == content(read(None)) == content(read(tmp_path / "cache"))
    time = path.stat().st_mtime_ns
    write(ROWS.assign(review=ROWS.review.str.replace("NA", "zw")), path)
    os.utime(path, ns=(time, time))  # as `cp -p` does
    after = read(tmp_path / "cache")
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


@pytest.mark.parametrize(
    ("options", "reason"), [("size=64k", "No space left on device"), ("ro", "Read-only file system")]
)
def test_a_cache_folder_that_cannot_be_used_is_reported(review_csv, mount, options, reason):
    cache = mount(options)
    with pytest.raises(UserError, match=reason):
        read_reviews(review_csv(5_000), cache_dir=cache)
    assert not list(cache.rglob("*.arrow"))


# --- mistakes ---

GOOD = "label,review\n1,很好\n0,很差\n"
LINE = '{"review": "a", "label": 1}\n'
# tests/launched/test_user_mistakes.py has the plainest ones: files that are missing, empty, cut off or binary.
MISTAKES = [
    ("rows.csv", "label,review\r\n\r\n \n", "has no rows"),
    ("rows.csv", "label,review\n1,\n,好\n0, \n", "('review') and a label ('label'): 2 with no review, 1"),
    ("rows.csv", 'label,"a\nb"\n1,x\n', r"no column 'review'; the file has 'label', 'a\nb' "),
    ("rows.csv", "review,stars\na,1\nb,0\n", "no column 'label'; the file has 'review', 'stars' "),
    ("rows.csv", "label,review\n1,a\n1.0,b\n", "column 'label' has only one class, '1'"),
    ("rows.csv", 'label,review\n1,a\n0,"b\n1,c\n', "row 2"),
    ("rows.csv", "label,review\n1,a,b\n0,b,c\n", "Length of header"),
    ("rows.csv", "label,review\n1,a,\n0,b,\n", "Length of header"),
    ("rows.csv", 'label,review\n1,"a\nb"\n\n0,b,c\n', "line 4"),
    ("rows.csv", "label,review\n" + "1,a\n0,b\n" * 10_000 + "0,b,c\n", "line 20002"),
    ("rows.csv", GOOD.encode("utf-16"), "is neither UTF-8 nor GB18030"),
    ("rows.csv", GOOD.encode("gb18030") + "1,好".encode("gb18030")[:-1], "is neither UTF-8 nor GB18030"),
    ("rows.jsonl", LINE + '{"review": "b", label: 0}\n', "row 1"),
    ("rows.jsonl", LINE + "\n[1]\n", "row 1"),
    ("rows.jsonl", LINE.encode() + b'{"review": "\xff", "label": 0}\n', "column 'review'"),
    ("rows.jsonl", LINE + '{"review": "\\ud800", "label": 0}\n', "JSON parse error"),
    ("rows.jsonl", "", "has no rows"),
    ("rows.jsonl", "{}\n{}\n", "has no rows"),
    ("rows.jsonl", '{"review": ["a"], "label": 1}\n', "row 0, column 'review'"),
    ("rows.json", "[" + LINE, "array value"),
    ("rows.json", "[]\n", "has no rows"),
    ("rows.parquet", ROWS.to_parquet()[:-20], "parquet file"),  # cut off
    ("rows.parquet", ROWS[:0].to_parquet(), "BatchSize"),
]


@pytest.mark.parametrize(("name", "content", "message"), MISTAKES)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        read_reviews(path, cache_dir=tmp_path / "cache")
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_pipe_is_rejected_because_opening_it_would_wait_forever(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: is not a regular file"):
        read_reviews(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("name", "path", "config"),
    [("owner/name", "owner/name", None), ("owner/name/config", "owner/name", "config"), ("imdb", "imdb", None)],
)
def test_a_data_set_on_the_hub_may_be_followed_by_a_config(monkeypatch, tmp_path, name, path, config):
    load = Mock(side_effect=ConnectionError("no network"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=f"--dataset_name {name}: no network"):
        open_sources(Settings(dataset_name=name))
    assert [call.args for call in load.mock_calls] == [(path, config)]
