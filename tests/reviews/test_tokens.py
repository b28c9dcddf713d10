from __future__ import annotations

import numpy as np
import pytest

from app.errors import UserError
from app.model.tiny_bert import learn_tokenizer
from app.reviews.table import read_reviews
from app.reviews.tokens import lengths_of, tokenise


def test_rows_keep_their_order_labels_and_lengths(alone, review_csv, tmp_path):
    table = read_reviews(review_csv(50))
    tokenizer = learn_tokenizer(table.texts)
    rows = tokenise(table, tokenizer, 16, tmp_path / "cache", alone)
    assert rows["labels"][:] == table.labels.tolist()
    expected = [tokenizer(text, truncation=True, max_length=16)["input_ids"] for text in table.texts]
    assert rows["input_ids"][:] == expected
    assert np.array_equal(lengths_of(rows), [len(ids) for ids in expected])
    assert max(lengths_of(rows)) == 16
    assert "attention_mask" not in rows.column_names
    assert "review" not in rows.column_names, "no second copy of the text"


def test_the_cache_is_used_again_and_knows_rows_tokenizer_and_length(alone, review_csv, tmp_path):
    cache = tmp_path / "cache"
    table = read_reviews(review_csv(50))
    tokenizer = learn_tokenizer(table.texts)
    tokenise(table, tokenizer, 16, cache, alone)
    (file,) = cache.iterdir()
    before = file.stat().st_mtime_ns
    tokenise(table, tokenizer, 16, cache, alone)
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [before]
    tokenise(table, tokenizer, 15, cache, alone)
    tokenise(table, learn_tokenizer(table.texts[:3]), 16, cache, alone)
    tokenise(read_reviews(review_csv(51, "more.csv")), tokenizer, 16, cache, alone)
    assert len(list(cache.iterdir())) == 4


def test_a_cache_that_can_not_be_written_or_read_is_one_line(alone, review_csv, tmp_path):
    table = read_reviews(review_csv(20))
    tokenizer = learn_tokenizer(table.texts)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--cache_dir .*file"):
        tokenise(table, tokenizer, 16, tmp_path / "file", alone)
    cache = tmp_path / "cache"
    tokenise(table, tokenizer, 16, cache, alone)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match="delete it"):
        tokenise(table, tokenizer, 16, cache, alone)
