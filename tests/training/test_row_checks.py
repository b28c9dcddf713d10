"""Reviews that would end a run in the middle are named before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.architectures import write_model
from tokenizers import normalizers, processors
from transformers import PreTrainedTokenizerFast

from app.common.errors import AgreedError
from app.data.reviews import read_reviews
from app.data.tokenize import count_of_tokens, tokenize_in_memory
from app.distributed.world import World
from app.settings import Settings
from app.training.build import build_data, build_model


def write_rows(folder: Path, *reviews: str) -> Settings:
    """Write 40 ordinary reviews and these after them, so that the first of these is data row 40."""
    csv = folder / "reviews.csv"
    lines = [f'{i % 2},"{review}"' for i, review in enumerate([*(["好，差"] * 40), *reviews])]
    csv.write_text("\n".join(["label,review", *lines]) + "\n", "utf-8")
    return Settings(csv=str(csv), cache_dir=str(folder), max_length=8, train_batch_size=8, use_cpu=True)


def without_special_tokens(model: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.backend_tokenizer.normalizer = normalizers.BertNormalizer()  # removes zero-width spaces
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    tokenizer.save_pretrained(model)


def check(settings: Settings, world: World, message: str) -> None:
    with pytest.raises(AgreedError, match=message):
        build_model(settings, build_data(settings, world), world)


def test_reviews_without_tokens_are_a_mistake(world, tmp_path):
    settings = write_rows(tmp_path, "好", "\u200b", "𓀀", "\u200b\u200b")
    settings.model = str(write_model(tmp_path / "model", "gpt2"))
    build_model(settings, build_data(settings, world), world)  # they have special tokens
    without_special_tokens(Path(settings.model))
    check(settings, world, r"its tokenizer returns no token for rows 41, 43 \(")


def test_unknown_tokens_are_tokens(world, tmp_path):
    settings = write_rows(tmp_path, "𓀀𓀁")
    settings.model = str(write_model(tmp_path / "model", "gpt2"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(settings.model)
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    assert set(tokenizer("𓀀𓀁")["input_ids"]) == {tokenizer.unk_token_id}
    build_model(settings, build_data(settings, world), world)


def test_a_tokenizer_that_does_not_truncate_is_a_mistake(world, tmp_path, monkeypatch):
    settings = write_rows(tmp_path, "好" * 20)
    settings.model = str(write_model(tmp_path / "model", "bert"))
    call = PreTrainedTokenizerFast.__call__

    def without_truncation(self, texts, **options):
        return call(self, texts, **options | {"truncation": False, "max_length": None})

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", without_truncation)
    check(settings, world, "its tokenizer does not truncate row 40 .* to --max_length 8$")


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_the_text_of_the_end_of_sequence_token_is_a_mistake_for_encoder_decoders(world, tmp_path, name):
    """They reject a batch in which one row has more of these tokens than another."""
    settings = write_rows(tmp_path, "好", "好[SEP]差", "好" * 20 + "[SEP]")
    settings.model = str(write_model(tmp_path / "model", name))
    check(settings, world, r"the number of end-of-sequence tokens, by which it classifies, differs in row 41 \(")
    settings.model = str(write_model(tmp_path / "bert", "bert"))
    build_model(settings, build_data(settings, world), world)


def test_fewer_end_of_sequence_tokens_are_not_taken_for_their_text(world, tmp_path):
    settings = write_rows(tmp_path, *["好[SEP]差"] * 50)
    settings.model = str(write_model(tmp_path / "model", "bart"))
    check(settings, world, "the number of end-of-sequence tokens, by which it classifies, differs in rows 0,")


def test_tokens_are_counted_in_every_chunk_of_the_rows(tmp_path):
    settings = write_rows(tmp_path, *["差差", "好", "差"] * 900)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(write_model(tmp_path / "model", "bert"))
    rows = tokenize_in_memory(read_reviews(settings.csv_path), tokenizer, 8)
    (token,) = tokenizer("差", add_special_tokens=False)["input_ids"]
    expected = [row.count(token) for row in rows["input_ids"]]
    assert {0, 1, 2} <= set(expected)
    assert count_of_tokens(rows, {token}).tolist() == expected
