"""Tokenizing reviews and the cache of tokens."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
from datasets import Dataset

from app.common.errors import UserError
from app.data import tokenize as tokenize_module
from app.data.reviews import read_reviews
from app.data.tokenize import TokenRows, count_truncated, lengths_of, tokenize
from app.model.built_in import learn_tokenizer


def test_tokenized_rows_keep_order_labels_and_lengths(world, review_csv, tmp_path):
    table = read_reviews(review_csv(50))
    tokenizer = learn_tokenizer(table.texts, 8_000)
    rows = tokenize(table, tokenizer, 16, cache_dir=tmp_path / "cache", world=world)
    assert rows["labels"][:] == table.labels.tolist()
    expected = [tokenizer(text, truncation=True, max_length=16)["input_ids"] for text in table.texts]
    assert rows["input_ids"][:] == expected
    assert np.array_equal(lengths_of(rows), [len(ids) for ids in expected])
    assert max(lengths_of(rows)) == 16
    assert "attention_mask" not in rows.column_names
    assert "review" not in rows.column_names, "the cache must not contain a second copy of the text"


def test_rows_for_loaders_are_views_of_the_selected_rows(world, review_csv, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_module, "CHUNK", 7)
    table = read_reviews(review_csv(50))
    rows = tokenize(table, learn_tokenizer(table.texts, 8_000), 16, cache_dir=tmp_path / "cache", world=world)
    positions = np.random.default_rng(0).permutation(50)[:30]
    selected = TokenRows(rows, positions)
    assert len(selected) == 30
    assert len(selected.labels) == 8, "chunks of the file"
    for index, position in enumerate(positions.tolist()):
        row, expected = selected[index], rows[position]
        assert row.keys() == {"input_ids", "labels"}
        assert {name: np.asarray(row[name]).tolist() for name in row} == {name: expected[name] for name in row}
        assert not row["input_ids"].flags.writeable, "the memory of the file"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["rust", "python"])
def test_truncated_reviews_are_counted(world, review_csv, tmp_path, monkeypatch, side, kind):
    table = read_reviews(review_csv(50))
    tokenizer = learn_tokenizer(table.texts, 8_000)
    tokenizer.truncation_side = side
    full_lengths = np.array([len(ids) for ids in tokenizer(table.texts.tolist())["input_ids"]])
    max_length = int(np.median(full_lengths))
    assert (full_lengths == max_length).any(), "a review of exactly the maximum length is not truncated"
    if kind == "python":  # tokenizers without a Rust backend return no encodings
        monkeypatch.setattr("transformers.BatchEncoding.encodings", None)
    rows = tokenize(table, tokenizer, max_length, cache_dir=tmp_path / "cache", world=world)
    assert count_truncated(rows) == (full_lengths > max_length).sum() > 0
    assert count_truncated(
        tokenize(table, tokenizer, max_length, cache_dir=tmp_path / "cache", world=world)
    ) == count_truncated(rows)


def test_the_cache_is_reused_only_for_the_same_rows_tokenizer_and_length(world, review_csv, tmp_path):
    cache = tmp_path / "cache"
    table = read_reviews(review_csv(50))
    tokenizer = learn_tokenizer(table.texts, 8_000)
    tokenize(table, tokenizer, 16, cache_dir=cache, world=world)
    (file,) = cache.iterdir()
    before = file.stat().st_mtime_ns
    tokenize(table, tokenizer, 16, cache_dir=cache, world=world)
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [before]
    tokenize(table, tokenizer, 15, cache_dir=cache, world=world)
    tokenize(table, learn_tokenizer(table.texts[:3], 8_000), 16, cache_dir=cache, world=world)
    tokenize(read_reviews(review_csv(51, "more.csv")), tokenizer, 16, cache_dir=cache, world=world)
    tokenizer.truncation_side = "left"
    tokenize(table, tokenizer, 16, cache_dir=cache, world=world)
    assert len(list(cache.iterdir())) == 5


def test_special_tokens_in_reviews_are_split_if_the_tokenizer_says_so_despite_the_cache(world, tmp_path):
    path = tmp_path / "reviews.csv"
    path.write_text("label,review\n0,a[SEP]b\n1,b[SEP]a\n")
    table = read_reviews(path)
    tokenizer = learn_tokenizer(table.texts, 8_000)
    special = tokenize(table, tokenizer, 32, cache_dir=tmp_path / "cache", world=world)
    tokenizer.split_special_tokens = True
    split = tokenize(table, tokenizer, 32, cache_dir=tmp_path / "cache", world=world)
    assert special["input_ids"][0].count(tokenizer.sep_token_id) == 2
    assert split["input_ids"][0].count(tokenizer.sep_token_id) == 1


def test_a_cache_folder_that_cannot_be_written_is_reported(world, review_csv, tmp_path):
    table = read_reviews(review_csv(20))
    tokenizer = learn_tokenizer(table.texts, 8_000)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--cache_dir .*file"):
        tokenize(table, tokenizer, 16, cache_dir=tmp_path / "file", world=world)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_write_leaves_nothing_in_the_cache(world, review_csv, tmp_path, monkeypatch, error):
    table = read_reviews(review_csv(50))
    tokenizer = learn_tokenizer(table.texts, 8_000)

    def fail(*_, **__):
        assert len(list((tmp_path / "cache").iterdir())) == 1, "the staging folder"
        raise error

    monkeypatch.setattr("app.data.tokenize._were_truncated", fail)
    with pytest.raises(UserError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        tokenize(table, tokenizer, 16, cache_dir=tmp_path / "cache", world=world)
    assert list((tmp_path / "cache").iterdir()) == []
    if isinstance(error, OSError):
        assert "cannot be written: No space left on device" in str(caught.value)


def test_concurrent_writers_leave_one_file(world, review_csv, tmp_path, monkeypatch):
    table = read_reviews(review_csv(50))
    tokenizer = learn_tokenizer(table.texts, 8_000)
    others = []
    were_truncated = tokenize_module._were_truncated

    def let_another_writer_finish_first(*arguments, **names):
        if not others:
            others.append(None)
            others[0] = tokenize(table, tokenizer, 16, cache_dir=tmp_path / "cache", world=world).to_dict()
        return were_truncated(*arguments, **names)

    monkeypatch.setattr(tokenize_module, "_were_truncated", let_another_writer_finish_first)
    assert tokenize(table, tokenizer, 16, cache_dir=tmp_path / "cache", world=world).to_dict() == others[0]
    (file,) = (tmp_path / "cache").iterdir()
    assert Dataset.from_file(str(file)).to_dict() == others[0]


@pytest.mark.parametrize("options", ["size=64k", "ro"])
def test_a_full_or_read_only_cache_folder_is_reported(world, review_csv, mount, options):
    table = read_reviews(review_csv(5_000))
    cache = mount(options)
    with pytest.raises(UserError, match=r"--cache_dir .*be written: (No space left on device|Read-only)"):
        tokenize(table, learn_tokenizer(table.texts[:100], 8_000), 64, cache_dir=cache, world=world)
    assert list(cache.iterdir()) == []


def test_a_read_only_cache_folder_is_usable_if_it_has_the_tokens(world, review_csv, mount, tmp_path):
    table = read_reviews(review_csv(50))
    tokenizer = learn_tokenizer(table.texts, 8_000)
    cache = mount("size=1m")
    expected = tokenize(table, tokenizer, 16, cache_dir=cache, world=world).to_dict()
    subprocess.run(["mount", "-o", "remount,ro", str(cache)], check=True)
    assert tokenize(table, tokenizer, 16, cache_dir=cache, world=world).to_dict() == expected
