"""The file of the cache that the ranks map instead of reading the CSV again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from app.common.errors import UserError
from app.data import csv_table, sources
from app.data.csv_checks import read_columns
from app.data.csv_table import ReviewTable, read_reviews, sample_rows

ODD = '\ufeff\nid,label,review\n1,好评,"第一\r\n\n行,""x"""\n\n  \n2,,没有标签\n3,差评, \n4, 差评 ,  好 \n5,好评,😀𠮷\n'


def contents(table: ReviewTable) -> list[object]:
    facts = [table.path, table.sha256, table.rows_read, table.dropped, table.class_names]
    assert (table.rows.dtype, table.labels.dtype) == (np.int64, np.int64)
    return [*facts, table.rows.tolist(), table.labels.tolist(), table.texts.tolist()]


@pytest.fixture
def reads(monkeypatch) -> list[Path]:
    """The path of each CSV that is parsed."""
    found: list[Path] = []

    def read(path, **columns):
        found.append(path)
        return read_columns(path, **columns)

    monkeypatch.setattr(sources, "read_columns", read)
    return found


@pytest.mark.parametrize("encoding", ["utf-8", "gb18030"])
def test_a_cached_table_is_the_table_of_the_csv_and_is_read_once(tmp_path, reads, encoding):
    path, cache = tmp_path / "odd.csv", tmp_path / "cache"
    path.write_bytes((ODD if encoding == "utf-8" else ODD.removeprefix("\ufeff")).encode(encoding))
    expected = contents(read_reviews(path))
    assert expected[2:] == [
        *(5, {"no review": [2], "no label": [1]}, ("好评", "差评")),
        *([0, 3, 4], [0, 1, 0], ['第一\r\n\n行,"x"', "  好 ", "😀𠮷"]),
    ]
    assert contents(read_reviews(path, cache_dir=cache)) == expected
    assert contents(read_reviews(path, cache_dir=cache)) == expected
    assert len(reads) == 2
    copy = tmp_path / "copy.csv"
    copy.write_bytes(path.read_bytes())
    assert contents(read_reviews(copy, cache_dir=cache)) == [copy, *expected[1:]]
    assert len(reads) == 2, "the path is not part of the key"


def test_cached_reviews_are_mapped_not_copied(review_csv, tmp_path):
    path, cache = review_csv(2_000), tmp_path / "cache"
    read_reviews(path, cache_dir=cache)
    before = pa.total_allocated_bytes()
    table = read_reviews(path, cache_dir=cache)
    assert pa.total_allocated_bytes() - before < 1_000
    assert len(table) == 2_000


def test_other_content_columns_or_names_are_read_again(review_csv, tmp_path, reads):
    cache, path = tmp_path / "cache", tmp_path / "two.csv"
    path.write_text("label,review,other\n1,好,甲\n0,差,乙\n", encoding="utf-8")
    assert read_reviews(path, cache_dir=cache).texts.tolist() == ["好", "差"]
    assert read_reviews(path, "other", cache_dir=cache).texts.tolist() == ["甲", "乙"]
    path.write_text("label,review,other\n1,好,甲\n0,坏,乙\n", encoding="utf-8")
    assert read_reviews(path, cache_dir=cache).texts.tolist() == ["好", "坏"]
    assert len(reads) == len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:-1], lambda content: content + b"\0"])
def test_a_damaged_file_is_written_again(review_csv, tmp_path, reads, damage):
    path, cache = review_csv(50), tmp_path / "cache"
    expected = contents(read_reviews(path, cache_dir=cache))
    (file,) = cache.iterdir()
    content = file.read_bytes()
    file.write_bytes(damage(content))
    assert contents(read_reviews(path, cache_dir=cache)) == expected
    assert file.read_bytes() == content
    assert len(reads) == 2
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    file.write_bytes(flipped)
    assert contents(read_reviews(path, cache_dir=cache)) == expected
    assert len(reads) == 3


@pytest.mark.parametrize("content", ["label,review\n1,好\n", 'label,review\n1,好\n0,"差\n', "label,text\n1,好\n0,差\n"])
def test_a_mistake_in_the_csv_has_the_same_message_and_leaves_nothing(tmp_path, content):
    path, cache = tmp_path / "reviews.csv", tmp_path / "cache"
    path.write_text(content, encoding="utf-8")
    messages = []
    for folder in (None, cache, cache):
        with pytest.raises(UserError) as caught:
            read_reviews(path, cache_dir=folder)
        messages.append(str(caught.value))
    assert len(set(messages)) == 1
    assert list(cache.iterdir()) == []


def test_a_csv_that_changes_while_it_is_read_is_not_cached(review_csv, tmp_path, monkeypatch):
    path, cache = review_csv(50), tmp_path / "cache"

    def change_after_reading(*arguments, **columns):
        yield from read_columns(*arguments, **columns)
        path.write_text(path.read_text(encoding="utf-8") + "1,好\n", encoding="utf-8")

    monkeypatch.setattr(sources, "read_columns", change_after_reading)
    with pytest.raises(UserError, match="has changed while it was read"):
        read_reviews(path, cache_dir=cache)
    assert list(cache.iterdir()) == []


def test_a_cache_folder_that_cannot_be_used_is_reported(review_csv, tmp_path, mount):
    path = review_csv(5_000)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--cache_dir .*file: cannot be written"):
        read_reviews(path, cache_dir=tmp_path / "file")
    for options, reason in (("size=64k", "No space left on device"), ("ro", "Read-only file system")):
        cache = mount(options)
        with pytest.raises(UserError, match=f"--cache_dir .*cannot be written: {reason}"):
            read_reviews(path, cache_dir=cache)
        assert list(cache.iterdir()) == []


@pytest.mark.parametrize(("n", "at_most", "expected"), [(5, 5, 5), (5, 9, 5), (6, 5, 3), (100, 7, 7), (0, 5, 0)])
def test_sampled_rows_are_at_equal_distances(monkeypatch, n, at_most, expected):
    monkeypatch.setattr(csv_table, "MAX_SAMPLE", at_most)
    rows = sample_rows(np.arange(10, 10 + n))
    assert len(rows) == expected
    assert len(set(np.diff(rows).tolist())) <= 1


def test_a_vocabulary_is_learned_from_a_sample(review_csv, monkeypatch):
    table = read_reviews(review_csv(50))
    rows = np.arange(5, 45)
    assert table.sample_texts(rows).tolist() == table.texts.tolist()[5:45]
    monkeypatch.setattr(csv_table, "MAX_SAMPLE", 10)
    assert table.sample_texts(rows).tolist() == table.texts.tolist()[5:45:4]
