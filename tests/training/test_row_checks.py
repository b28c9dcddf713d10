"""Reviews that would end a run in the middle are named before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.architectures import write_model
from tokenizers import normalizers, processors
from transformers import PreTrainedTokenizerFast

from app.common.errors import AgreedError
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
