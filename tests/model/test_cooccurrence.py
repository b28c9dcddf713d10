"""Embeddings that are learned from the neighbors of tokens."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from app.common.errors import UserError
from app.model import cooccurrence
from app.model.cooccurrence import (
    SMOOTHING,
    STANDARD_DEVIATION,
    WINDOW,
    cached_embeddings,
    count_neighbors,
    learn_embeddings,
    positive_information,
)

VOCABULARY = 12
ROWS = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=15), max_size=6)


@given(ROWS)
def test_neighbors_are_counted_within_a_text_only(rows):
    counts = Counter()
    for row in rows:
        for i, token in enumerate(row):
            for j in range(max(0, i - WINDOW), min(len(row), i + WINDOW + 1)):
                counts[token, row[j]] += i != j
    found = count_neighbors(rows, VOCABULARY).toarray()
    assert found.tolist() == [[counts[a, b] for b in range(VOCABULARY)] for a in range(VOCABULARY)]


@given(ROWS)
def test_information_is_that_of_the_definition(rows):
    counts = count_neighbors(rows, VOCABULARY)
    dense = counts.toarray()
    with np.errstate(divide="ignore", invalid="ignore"):
        of_neighbors = dense.sum(axis=0) ** SMOOTHING
        expected = np.log((dense / dense.sum(axis=1, keepdims=True)) / (of_neighbors / of_neighbors.sum()))
    expected = np.where(dense > 0, np.maximum(expected, 0), 0)
    np.testing.assert_allclose(positive_information(counts).toarray(), expected, rtol=1e-9, atol=1e-12)


@given(ROWS, st.integers(1, 20))
def test_embeddings_have_the_size_of_the_model_and_are_zero_without_neighbors(rows, size):
    embeddings = learn_embeddings(rows, VOCABULARY, size)
    assert embeddings.shape == (VOCABULARY, size)
    assert embeddings.dtype == np.float32
    assert np.isfinite(embeddings).all()
    if embeddings.any():
        assert embeddings.std() == pytest.approx(STANDARD_DEVIATION, rel=1e-5)
    with_neighbors = {token for row in rows if len(row) > 1 for token in row}
    assert not embeddings[[token for token in range(VOCABULARY) if token not in with_neighbors]].any()


def test_tokens_with_the_same_neighbors_get_similar_embeddings():
    rows = [[verb, 2, noun] for verb in (0, 1) for noun in (3, 4)] * 5 + [[5, 6, 7]] * 20
    embeddings = learn_embeddings(rows, 8, 4)
    normalized = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    similarity = normalized @ normalized.T
    assert similarity[0, 1] > 0.99 > 0.1 > abs(similarity[0, 5])


@pytest.fixture(scope="module")
def random_rows() -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [(generator.zipf(1.3, 60) % 700).tolist() for _ in range(300)]


def test_the_number_of_threads_does_not_matter(random_rows):
    with threadpool_limits(limits=1):
        one = learn_embeddings(random_rows, 700, 128)
    with threadpool_limits(limits=2):
        two = learn_embeddings(random_rows, 700, 128)
    assert one.tobytes() == two.tobytes()


def test_embeddings_are_learned_once_for_equal_rows(random_rows, tmp_path, monkeypatch):
    calls = []
    learn = cooccurrence.learn_embeddings
    monkeypatch.setattr(cooccurrence, "learn_embeddings", lambda *given: calls.append(given) or learn(*given))
    first, second = (cached_embeddings(random_rows, 700, 8, cache_dir=tmp_path) for _ in range(2))
    assert len(calls) == 1
    assert first.tobytes() == second.tobytes()
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert cached_embeddings(random_rows, 700, 8, cache_dir=tmp_path).tobytes() == first.tobytes()
    assert len(calls) == 2, "a damaged file is written again"
    cached_embeddings(random_rows, 701, 8, cache_dir=tmp_path)
    cached_embeddings(random_rows, 700, 9, cache_dir=tmp_path)
    cached_embeddings([*random_rows[:-1], random_rows[-1][::-1]], 700, 8, cache_dir=tmp_path)
    monkeypatch.setattr(cooccurrence, "WINDOW", WINDOW + 1)
    cached_embeddings(random_rows, 700, 8, cache_dir=tmp_path)
    assert len(calls) == 6


def test_a_cache_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^--cache_dir .*file: cannot be written"):
        cached_embeddings([[1, 2]], 3, 2, cache_dir=tmp_path / "file")
