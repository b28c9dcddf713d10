"""The built-in models, their tokenizer, and the embeddings that are learned from the neighbors of tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers.reviews import read_reviews
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from app.model import built_in
from app.model.built_in import OFFSETS, SPECIAL_TOKENS, embeddings_of, learn_embeddings, learn_tokenizer
from app.model.load import load_classifier, load_tokenizer
from app.settings import Settings

TEXTS = ["房间很干净，服务很好。Room 301 OK", "房间不干净，服务很差。"] * 20
SIZE = 4_000
VOCABULARY = 12
ROWS = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=15), max_size=6)


def test_equal_texts_give_identical_tokenizers_and_the_real_reviews_fill_the_vocabulary(real_csv):
    texts = read_reviews(real_csv).texts
    first, second = (learn_tokenizer(texts, 8_000) for _ in range(2))
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    assert len(first) == 8_000


def test_tokens_are_short_and_texts_get_special_tokens():
    tokenizer = learn_tokenizer(TEXTS, SIZE)
    tokens = set(tokenizer.get_vocab()) - set(SPECIAL_TOKENS.values())
    assert max(map(len, tokens)) <= built_in.MAX_TOKEN_LENGTH
    ids = tokenizer("房间很好")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:1] + tokenizer.convert_ids_to_tokens(ids)[-1:] == ["[CLS]", "[SEP]"]
    assert tokenizer.unk_token_id in tokenizer("鑫")["input_ids"]
    assert tokenizer("ＯＫ room")["input_ids"] == tokenizer("ok ROOM")["input_ids"], "NFKC and lower case"


@given(rows=ROWS, size=st.integers(1, 20))
def test_embeddings_factorize_the_information_of_neighbors(rows, size):
    dense = np.zeros((VOCABULARY, VOCABULARY))
    for row in rows:  # neighbors are counted within a text only
        for i, j in itertools.permutations(range(len(row)), 2):
            dense[row[i], row[j]] += abs(i - j) <= built_in.WINDOW
    with np.errstate(divide="ignore", invalid="ignore"):
        of_neighbors = dense.sum(axis=0) ** built_in.SMOOTHING
        information = np.log((dense / dense.sum(axis=1, keepdims=True)) / (of_neighbors / of_neighbors.sum()))
    information = np.where(dense > 0, np.maximum(information, 0), 0)
    embeddings = learn_embeddings(rows, VOCABULARY, size)
    assert embeddings.shape == (VOCABULARY, size)
    assert embeddings.dtype == np.float32
    assert not embeddings[dense.sum(axis=1) == 0].any(), "tokens without neighbors have none"
    if embeddings.any():
        assert embeddings.std() == pytest.approx(built_in.STANDARD_DEVIATION, rel=1e-5)
    if information.max() > 1e-3 and size >= VOCABULARY:  # otherwise the information is zero except for rounding
        # Their inner products are unique, unlike the embeddings: U S U' of the decomposition U S V'.
        left, singular_values, _ = np.linalg.svd(information)
        expected, found = (left * singular_values) @ left.T, embeddings.astype(np.float64) @ embeddings.T
        np.testing.assert_allclose(found / np.trace(found), expected / np.trace(expected), atol=1e-5)


def test_the_number_of_threads_does_not_matter():
    generator = np.random.default_rng(0)
    rows = [(generator.zipf(1.3, 60) % 700).tolist() for _ in range(300)]
    found = []
    for threads in (1, 2):
        with threadpool_limits(limits=threads):
            found.append(learn_embeddings(rows, 700, 128).tobytes())
    assert found[0] == found[1]


def build(texts=TEXTS, **settings):
    settings = Settings(**settings)
    tokenizer = load_tokenizer(settings, texts)
    embeddings = embeddings_of(settings.model, tokenizer, texts)
    return load_classifier(settings, ["0", "1"], tokenizer, embeddings=embeddings).model.eval(), tokenizer, embeddings


def test_each_attention_head_looks_at_one_of_the_next_tokens():
    model, tokenizer, _ = build()
    ids = torch.tensor([tokenizer(TEXTS[0] * 4)["input_ids"]])
    (weights,) = model(ids, output_attentions=True).attentions  # (rows, heads, tokens, tokens)
    positions = torch.arange(2, ids.shape[1] - 2)
    for head, offset in enumerate(OFFSETS):
        at_offset = weights[0, head, positions, positions + offset]
        assert at_offset.min() > 0.9


def test_embeddings_are_learned_for_tokens_that_occur_and_random_for_others():
    model, tokenizer, learned = build()
    weight = model.get_input_embeddings().weight.detach()
    occurs = torch.from_numpy(learned).any(dim=1)
    assert torch.equal(weight[occurs], torch.from_numpy(learned)[occurs])
    assert not occurs[tokenizer.mask_token_id]
    assert weight[tokenizer.mask_token_id].any()
    other, _, _ = build(seed=1)
    of_other = other.get_input_embeddings().weight.detach()
    assert torch.equal(weight[occurs], of_other[occurs]), "they do not depend on the seed"
    assert not torch.equal(weight[tokenizer.mask_token_id], of_other[tokenizer.mask_token_id])


@pytest.mark.parametrize(("model", "max_length", "few", "many"), [("tiny", 256, 12, 6), ("tiny-bert", 128, 3, 3)])
def test_a_built_in_model_has_defaults_of_its_own(model, max_length, few, many):
    assert (build(model=model)[2] is None) == (model == "tiny-bert"), "only `tiny` learns embeddings"
    settings = Settings(model=model)
    assert (settings.max_length, settings.epochs(2_499), settings.epochs(2_500)) == (max_length, few, many)
    given = Settings(model=model, max_length=64, num_train_epochs=5)
    assert (given.max_length, given.epochs(400)) == (64, 5)


def test_padding_is_no_problem_in_fp64():
    model, tokenizer, _ = build(precision="fp64")
    batch = tokenizer(["好", TEXTS[0] * 9], padding=True, return_tensors="pt")
    loss = model.train()(**batch, labels=torch.tensor([0, 1])).loss
    loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_the_cache_has_what_is_learned_again_only_from_other_texts_or_by_another_recipe(tmp_path, monkeypatch):
    cache, both = tmp_path / "new" / "cache", {"vocabulary", "embeddings"}

    def learned(texts: list[str]) -> set[str]:
        """Return which kinds of files are new in the cache."""
        before, expected = {*cache.glob("*")}, learn_tokenizer(texts, SIZE)
        tokenizer = learn_tokenizer(texts, SIZE, cache)
        assert tokenizer.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
        assert tokenizer.init_kwargs == expected.init_kwargs
        embeddings = embeddings_of("tiny", tokenizer, texts, cache_dir=cache)
        assert embeddings.tobytes() == embeddings_of("tiny", expected, texts).tobytes()
        return {path.name.partition("-")[0] for path in {*cache.glob("*")} - before}

    others = [TEXTS[:-1], TEXTS[::-1], ["".join(TEXTS[:2]), *TEXTS[2:]]]
    for expected in (both, set()):
        assert [learned(texts) for texts in (TEXTS, *others)] == [expected] * 4
    for name, again in (("WINDOW", {"embeddings"}), ("MAX_TOKEN_LENGTH", {"vocabulary"}), ("FILE_VERSION", both)):
        monkeypatch.setattr(built_in, name, getattr(built_in, name) + 1)
        assert learned(TEXTS) >= again
