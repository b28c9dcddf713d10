"""Learn embeddings of tokens from the texts alone: tokens that occur near the same tokens get similar vectors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path

import numpy as np
import scipy
import sklearn
from numpy.typing import NDArray
from scipy import sparse
from sklearn.utils.extmath import randomized_svd
from threadpoolctl import threadpool_limits

from ..common.cache import read_intact, write_intact

WINDOW = 5  # tokens to each side
SMOOTHING = 0.75  # of the counts of neighbors, as in word2vec: otherwise rare tokens have the highest PMI
STANDARD_DEVIATION = 0.3  # of the embeddings' elements
FILE_VERSION = 1  # part of the cache key: increase it if `learn_embeddings` changes


def cached_embeddings(
    rows: Sequence[Sequence[int]], vocabulary_size: int, size: int, *, cache_dir: Path
) -> NDArray[np.float32]:
    """Return the result of `learn_embeddings`, which takes seconds, or the one that an earlier call has written.

    Raises:
        UserError: the cache folder cannot be written.
    """
    lengths, ids = _flatten(rows)
    versions = [FILE_VERSION, np.__version__, scipy.__version__, sklearn.__version__]
    recipe = [*versions, WINDOW, SMOOTHING, STANDARD_DEVIATION, vocabulary_size, size]
    digest = hashlib.sha256(json.dumps(recipe).encode() + lengths.tobytes())
    digest.update(ids.tobytes())
    key = digest.hexdigest()[:32]
    path = cache_dir / f"embeddings-{key}.npy"
    if (content := read_intact(path, key)) is not None:
        cached: NDArray[np.float32] = np.load(BytesIO(content), allow_pickle=False)
        return cached
    learned = learn_embeddings(rows, vocabulary_size, size)
    write_intact(path, key, lambda file: np.save(file, learned, allow_pickle=False))
    return learned


def learn_embeddings(rows: Sequence[Sequence[int]], vocabulary_size: int, size: int) -> NDArray[np.float32]:
    """Factorize the positive pointwise mutual information of neighboring tokens (Levy, Goldberg and Dagan 2015).

    Equal rows give bitwise equal embeddings on one kind of CPU, with any number of threads. Do not pass test
    reviews: the model would learn from them.

    Args:
        rows: the token ids of each text.

    Returns:
        float32 (vocabulary_size, size). Tokens without neighbors have zeros.
    """
    information = positive_information(count_neighbors(rows, vocabulary_size))
    with threadpool_limits(limits=1):  # the number of threads affects rounding
        left, singular_values, _ = randomized_svd(information, min(size, vocabulary_size), random_state=0)
    # The square root of the singular values weights the largest ones less: section 3.3 of the paper recommends it.
    vectors = np.pad(left * np.sqrt(singular_values), ((0, 0), (0, size - left.shape[1])))
    vectors[information.sum(axis=1) == 0] = 0  # they may differ from zero by rounding
    deviation = vectors.std()
    return (vectors * (STANDARD_DEVIATION / deviation if deviation > 0 else 0)).astype(np.float32)


def count_neighbors(rows: Sequence[Sequence[int]], vocabulary_size: int) -> sparse.csr_array:
    """Return how often each token occurs within `WINDOW` tokens of each other one, float64 (vocabulary, vocabulary)."""
    lengths, ids = _flatten(rows)
    # One row per token of the texts, with a one in its column, and WINDOW empty rows behind each text: the product of
    # this matrix with itself, shifted by a distance, counts the pairs of tokens at that distance.
    places = np.arange(len(ids)) + WINDOW * np.repeat(np.arange(len(lengths)), lengths)
    shape = (len(ids) + WINDOW * len(lengths), vocabulary_size)
    tokens = sparse.csr_array((np.ones(len(ids)), (places, ids)), shape)
    ahead = sum(
        (tokens[:-distance].T @ tokens[distance:] for distance in range(1, WINDOW + 1)),
        start=sparse.csr_array((vocabulary_size, vocabulary_size)),
    )
    return sparse.csr_array(ahead + ahead.T)


def positive_information(counts: sparse.csr_array) -> sparse.csr_array:
    """Return log(P(token, neighbor) / (P(token) P(neighbor))) where it is positive, otherwise 0."""
    of_tokens = counts.sum(axis=1)
    of_neighbors = of_tokens**SMOOTHING  # the counts are symmetric
    pairs = sparse.coo_array(counts)
    expected = of_tokens[pairs.row] * of_neighbors[pairs.col] / of_neighbors.sum()
    information = np.maximum(np.log(pairs.data / expected), 0)
    return sparse.csr_array((information, (pairs.row, pairs.col)), counts.shape)


def _flatten(rows: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the length of each row, and the elements of all rows in order."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return lengths, np.fromiter(chain.from_iterable(rows), np.int64, lengths.sum())
