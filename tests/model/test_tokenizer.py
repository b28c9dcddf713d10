"""The tokenizer that the built-in models learn."""

from __future__ import annotations

import pytest

from app.common.cache import read_intact
from app.common.errors import UserError
from app.data.reviews import read_reviews
from app.data.split import split_reviews
from app.model import tokenizer as module
from app.model.load import load_tokenizer
from app.model.tokenizer import (
    MAX_TOKEN_LENGTH,
    SPECIAL_TOKENS,
    cached_tokenizer,
    learn_tokenizer,
)
from app.settings import Settings

SIZE = 4_000
TEXTS = ["房间很干净，服务很好。Room 301 OK", "房间很干净，服务很差。"] * 50


def test_equal_texts_give_identical_tokenizers(hotel_csv):
    table = read_reviews(hotel_csv)
    texts = table.texts.iloc[split_reviews(table, test_size=0.1, validation_size=0.0, seed=42).train]
    first, second = (learn_tokenizer(texts, SIZE).backend_tokenizer.to_str() for _ in range(2))
    assert first == second


def test_the_real_reviews_fill_the_vocabulary(real_csv):
    assert len(learn_tokenizer(read_reviews(real_csv).texts, 8_000)) == 8_000


def test_tokens_are_short_and_texts_get_special_tokens():
    tokenizer = learn_tokenizer(TEXTS, SIZE)
    tokens = set(tokenizer.get_vocab()) - set(SPECIAL_TOKENS.values())
    assert max(map(len, tokens)) <= MAX_TOKEN_LENGTH
    ids = tokenizer("房间很好")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:1] + tokenizer.convert_ids_to_tokens(ids)[-1:] == ["[CLS]", "[SEP]"]
    assert tokenizer.unk_token_id in tokenizer("鑫")["input_ids"]
    assert tokenizer("ＯＫ room")["input_ids"] == tokenizer("ok ROOM")["input_ids"], "NFKC and lower case"


@pytest.fixture
def learned(monkeypatch) -> list[list[str]]:
    """The texts of each vocabulary that is learned."""
    calls = []
    monkeypatch.setattr(
        module, "learn_tokenizer", lambda texts, size: calls.append(list(texts)) or learn_tokenizer(texts, size)
    )
    return calls


def test_a_vocabulary_is_learned_once_for_equal_texts(learned, tmp_path):
    first, second = (cached_tokenizer(TEXTS, SIZE, tmp_path / "new" / "cache") for _ in range(2))
    assert learned == [TEXTS]
    expected = learn_tokenizer(TEXTS, SIZE)
    for tokenizer in (first, second):
        assert tokenizer.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
        assert tokenizer.init_kwargs == expected.init_kwargs
        assert tokenizer(TEXTS[0]) == expected(TEXTS[0])
    first.save_pretrained(tmp_path / "first")
    second.save_pretrained(tmp_path / "second")
    for file in (tmp_path / "first").iterdir():
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes()


@pytest.mark.parametrize("others", [TEXTS[:-1], TEXTS[::-1], ["".join(TEXTS[:2]), *TEXTS[2:]]])
def test_a_vocabulary_is_learned_again_from_other_texts(learned, tmp_path, others):
    for texts in (TEXTS, others, TEXTS, others):
        cached_tokenizer(texts, SIZE, tmp_path)
    assert learned == [TEXTS, others]


@pytest.mark.parametrize("name", ["FILE_VERSION", "MAX_TOKEN_LENGTH"])
def test_a_vocabulary_is_learned_again_by_another_recipe(learned, tmp_path, monkeypatch, name):
    cached_tokenizer(TEXTS, SIZE, tmp_path)
    monkeypatch.setattr(module, name, getattr(module, name) + 1)
    cached_tokenizer(TEXTS, SIZE, tmp_path)
    cached_tokenizer(TEXTS, SIZE + 1, tmp_path)
    assert learned == [TEXTS] * 3


@pytest.mark.parametrize(
    "damage", [lambda content: b"", lambda content: content[:-1], lambda content: content.replace(b"[UNK]", b"[UNX]")]
)
def test_a_damaged_vocabulary_is_learned_and_written_again(learned, tmp_path, damage):
    expected = cached_tokenizer(TEXTS, SIZE, tmp_path).backend_tokenizer.to_str()
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    file.write_bytes(damage(content))
    assert cached_tokenizer(TEXTS, SIZE, tmp_path).backend_tokenizer.to_str() == expected
    assert file.read_bytes() == content
    assert learned == [TEXTS, TEXTS]


def test_two_processes_may_learn_the_same_vocabulary_at_once(tmp_path, monkeypatch):
    others = []

    def let_another_process_finish_first(texts, size):
        if not others:
            others.append(None)
            others[0] = cached_tokenizer(texts, SIZE, tmp_path)
        return learn_tokenizer(texts, size)

    monkeypatch.setattr(module, "learn_tokenizer", let_another_process_finish_first)
    own = cached_tokenizer(TEXTS, SIZE, tmp_path)
    assert own.backend_tokenizer.to_str() == others[0].backend_tokenizer.to_str()
    (file,) = tmp_path.iterdir()
    assert read_intact(file, file.stem.removeprefix("vocabulary-")) is not None


def test_a_cache_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^--cache_dir .*file: cannot be written: (File exists|Not a directory)$"):
        load_tokenizer(Settings(), TEXTS, cache_dir=tmp_path / "file")
