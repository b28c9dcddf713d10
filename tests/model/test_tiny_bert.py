"""The tokenizer and config of the default model."""

from __future__ import annotations

from app.data.csv_table import read_reviews
from app.data.split import split_reviews
from app.model.tiny_bert import MAX_TOKEN_LENGTH, SPECIAL_TOKENS, VOCABULARY_SIZE, learn_tokenizer


def test_equal_texts_give_identical_tokenizers(hotel_csv):
    table = read_reviews(hotel_csv)
    texts = table.texts.iloc[split_reviews(table, test_size=0.1, validation_size=0.0, seed=42).train]
    first, second = (learn_tokenizer(texts).backend_tokenizer.to_str() for _ in range(2))
    assert first == second


def test_the_real_reviews_fill_the_vocabulary(real_csv):
    assert len(learn_tokenizer(read_reviews(real_csv).texts)) == VOCABULARY_SIZE


def test_tokens_are_short_and_texts_get_special_tokens():
    tokenizer = learn_tokenizer(["房间很干净，服务很好。Room 301 OK", "房间很干净，服务很差。"] * 50)
    tokens = set(tokenizer.get_vocab()) - set(SPECIAL_TOKENS.values())
    assert max(map(len, tokens)) <= MAX_TOKEN_LENGTH
    ids = tokenizer("房间很好")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:1] + tokenizer.convert_ids_to_tokens(ids)[-1:] == ["[CLS]", "[SEP]"]
    assert tokenizer.unk_token_id in tokenizer("鑫")["input_ids"]
    assert tokenizer("ＯＫ room")["input_ids"] == tokenizer("ok ROOM")["input_ids"], "NFKC and lower case"
