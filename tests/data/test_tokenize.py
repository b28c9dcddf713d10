"""Tokenizing reviews and the cache of tokens."""

from __future__ import annotations

import subprocess
from typing import Any

import pandas as pd
import pytest
from helpers.reviews import read_reviews

from app.common.errors import UserError
from app.data.reviews import clean
from app.data.sources import open_file
from app.data.tokenize import hash_tokens, lengths_of, occurring_tokens, tokenize
from app.model.built_in import learn_tokenizer


@pytest.mark.parametrize(
    ("name", "value"), [("truncation_side", "left"), ("truncation_side", "right"), ("split_special_tokens", True)]
)
def test_rows_are_the_tokens_that_the_tokenizer_returns(review_csv, tmp_path, name, value):
    path = review_csv(1_050)  # more than `datasets` processes at once
    path.write_text(path.read_text("utf-8") + "0,a[SEP]b\n", "utf-8")
    table = read_reviews(path)
    tokenizer = learn_tokenizer(table.texts, 8_000)
    tokenize(table, tokenizer, 16, cache_dir=tmp_path / "cache")
    setattr(tokenizer, name, value)
    expected = [tokenizer(text, truncation=True, max_length=16)["input_ids"] for text in table.texts]
    hashes = set()
    for cache_dir in (tmp_path / "cache", tmp_path / "cache", None):
        rows = tokenize(table, tokenizer, 16, cache_dir=cache_dir)
        assert set(rows.column_names) == {"input_ids", "labels"}, "the cache needs no second copy of the text"
        assert rows["labels"][:] == table.labels.tolist()
        assert rows["input_ids"][:] == expected
        assert lengths_of(rows).tolist() == [len(ids) for ids in expected]
        assert occurring_tokens(rows).tolist() == sorted({token for ids in expected for token in ids})
        hashes.add(hash_tokens(rows, tokenizer))
    assert len(hashes) == 1


def test_the_cache_is_reused_only_for_the_same_rows_tokenizer_and_length(review_csv, tmp_path):
    cache = tmp_path / "cache"
    table, other = read_reviews(review_csv(50)), read_reviews(review_csv(51, "more.csv"))
    tokenizer = learn_tokenizer(table.texts, 8_000)

    def files_after(*arguments: Any) -> dict[str, int]:
        tokenize(*arguments, cache_dir=cache)
        return {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}

    assert files_after(table, tokenizer, 16) == files_after(table, tokenizer, 16)
    assert len(files_after(table, tokenizer, 15)) == 2
    assert len(files_after(table, learn_tokenizer(table.texts[:3], 8_000), 16)) == 3
    assert len(files_after(other, tokenizer, 16)) == 4


def test_another_column_or_encoding_of_the_same_file_has_its_own_tokens(tmp_path):
    path, cache = tmp_path / "rows.csv", tmp_path / "cache"
    path.write_bytes("title,body,label\n丁丁5 text,b,1\nother,a c,0\n".encode("gb18030"))  # valid CP1252 as well
    tokenizer = learn_tokenizer(pd.Series(["丁丁5 text b a c other ¶¡¶¡"] * 9), 8_000)
    for column, encoding in (("title", "cp1252"), ("body", "cp1252"), ("title", "gb18030"), ("body", "gb18030")):
        table = clean({"train": open_file(path, cache, encoding)}, (column, "label"))
        expected = [tokenizer(text)["input_ids"] for text in pd.read_csv(path, encoding=encoding)[column]]
        assert tokenize(table, tokenizer, 16, cache_dir=cache)["input_ids"][:] == expected


@pytest.mark.parametrize(
    ("options", "reason"), [("size=64k", "No space left on device"), ("ro", "Read-only file system")]
)
def test_a_full_or_read_only_cache_folder_is_reported(review_csv, mount, options, reason):
    cache = mount(options)
    with pytest.raises(UserError, match=reason):
        read_reviews(review_csv(5_000), cache_dir=cache)
    table = read_reviews(review_csv(5_000))
    with pytest.raises(UserError, match=f"--cache_dir .*be written: {reason}"):
        tokenize(table, learn_tokenizer(table.texts[:100], 8_000), 64, cache_dir=cache)
    assert [*cache.rglob("*.arrow"), *cache.glob("*tokens*")] == []


def test_a_read_only_cache_folder_is_usable_if_it_has_the_tokens(review_csv, mount):
    table = read_reviews(review_csv(50))
    tokenizer = learn_tokenizer(table.texts, 8_000)
    cache = mount("size=1m")
    expected = tokenize(table, tokenizer, 16, cache_dir=cache).to_dict()
    subprocess.run(["mount", "-o", "remount,ro", str(cache)], check=True)
    assert tokenize(table, tokenizer, 16, cache_dir=cache).to_dict() == expected
