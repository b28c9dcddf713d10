from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from app.data.csv_table import read_reviews
from app.data.tokenize import lengths_of, tokenize
from app.errors import UserError
from app.model.tiny_bert import learn_tokenizer


def test_rows_keep_their_order_labels_and_lengths(world, review_csv, tmp_path):
    table = read_reviews(review_csv(50))
    tokenizer = learn_tokenizer(table.texts)
    rows = tokenize(table, tokenizer, 16, tmp_path / "cache", world)
    assert rows["labels"][:] == table.labels.tolist()
    expected = [tokenizer(text, truncation=True, max_length=16)["input_ids"] for text in table.texts]
    assert rows["input_ids"][:] == expected
    assert np.array_equal(lengths_of(rows), [len(ids) for ids in expected])
    assert max(lengths_of(rows)) == 16
    assert "attention_mask" not in rows.column_names
    assert "review" not in rows.column_names, "no second copy of the text"


def test_the_cache_is_used_again_and_knows_rows_tokenizer_and_length(world, review_csv, tmp_path):
    cache = tmp_path / "cache"
    table = read_reviews(review_csv(50))
    tokenizer = learn_tokenizer(table.texts)
    tokenize(table, tokenizer, 16, cache, world)
    (file,) = cache.iterdir()
    before = file.stat().st_mtime_ns
    tokenize(table, tokenizer, 16, cache, world)
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [before]
    tokenize(table, tokenizer, 15, cache, world)
    tokenize(table, learn_tokenizer(table.texts[:3]), 16, cache, world)
    tokenize(read_reviews(review_csv(51, "more.csv")), tokenizer, 16, cache, world)
    tokenizer.truncation_side = "left"
    tokenize(table, tokenizer, 16, cache, world)
    assert len(list(cache.iterdir())) == 5


def test_a_cache_that_can_not_be_written_or_read_is_one_line(world, review_csv, tmp_path):
    table = read_reviews(review_csv(20))
    tokenizer = learn_tokenizer(table.texts)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--cache_dir .*file"):
        tokenize(table, tokenizer, 16, tmp_path / "file", world)
    cache = tmp_path / "cache"
    tokenize(table, tokenizer, 16, cache, world)
    (file,) = cache.iterdir()
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match=r"--cache_dir .*Is a directory"):
        tokenize(table, tokenizer, 16, cache, world)


def without_the_last_record_batch(content: bytes) -> bytes:
    """A valid Arrow stream of fewer rows: what a write that was cut off at a record batch leaves."""
    table = pa.ipc.open_stream(pa.py_buffer(content)).read_all()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        for batch in table.to_batches()[:-1]:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def with_a_flipped_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:100],
        lambda content: content[:-1],
        lambda content: content + b"\0",
        without_the_last_record_batch,
        with_a_flipped_bit,
    ],
)
def test_a_damaged_cache_is_made_again(world, review_csv, tmp_path, capsys, monkeypatch, damage):
    monkeypatch.setattr("app.data.tokenize.CHUNK", 8)
    monkeypatch.setattr("datasets.config.DEFAULT_MAX_BATCH_SIZE", 8)
    table = read_reviews(review_csv(50))
    tokenizer = learn_tokenizer(table.texts)
    expected = tokenize(table, tokenizer, 16, tmp_path / "cache", world).to_dict()
    (file,) = (tmp_path / "cache").iterdir()
    content = file.read_bytes()
    assert len(pa.ipc.open_stream(pa.py_buffer(content)).read_all().to_batches()) > 1
    file.write_bytes(damage(content))
    assert tokenize(table, tokenizer, 16, tmp_path / "cache", world).to_dict() == expected
    assert file.read_bytes() == content
    assert "tokenizing again" in capsys.readouterr().out
    assert list((tmp_path / "cache").iterdir()) == [file]


def test_a_cache_of_other_rows_under_this_name_is_not_used(world, review_csv, tmp_path):
    table = read_reviews(review_csv(50))
    tokenizer = learn_tokenizer(table.texts)
    tokenize(read_reviews(review_csv(40, "fewer.csv")), tokenizer, 16, tmp_path / "cache", world)
    (other,) = (tmp_path / "cache").iterdir()
    expected = tokenize(table, tokenizer, 16, tmp_path / "cache", world).to_dict()
    (file,) = set((tmp_path / "cache").iterdir()) - {other}
    other.rename(file)
    assert tokenize(table, tokenizer, 16, tmp_path / "cache", world).to_dict() == expected
