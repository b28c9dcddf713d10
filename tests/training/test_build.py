"""Mistakes that appear only when the data and the model meet, and what a run says about its data."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from helpers.architectures import write_model
from strategies.ranks import on_ranks
from tokenizers import normalizers, processors
from transformers import AutoConfig, AutoTokenizer, BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from app.common.errors import AgreedError
from app.model.built_in import learn_tokenizer
from app.settings import Settings
from app.training import build
from app.training.build import agree_on_model, build_data, build_model
from app.training.prepare import prepare


def write_rows(folder: Path, *texts: str, model: str = "gpt2") -> Settings:
    """Write 40 ordinary reviews and these after them, so that the first of these is data row 40, and a model."""
    lines = [f'{i % 2},"{review}"' for i, review in enumerate([*(["好，差"] * 40), *texts])]
    (folder / "reviews.csv").write_text("\n".join(["label,review", *lines]) + "\n", "utf-8")
    settings = Settings(csv=str(folder / "reviews.csv"), model=str(write_model(folder / "model", model)))
    return replace(settings, cache_dir=str(folder), max_length=8, train_batch_size=8, use_cpu=True)


def test_the_model_is_loaded_into_main_memory_whatever_the_device(world, tmp_path):
    """A sharded model need not fit on one device."""
    settings = write_rows(tmp_path)
    model = build_model(settings, build_data(settings, world), replace(world, device=torch.device("meta"))).model
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("torch", "install the same versions on every node"),
        ("tokens with the hash", "give every node the same files of the model"),  # such as another padding token
    ],
)
def test_nodes_with_other_versions_of_a_library_or_of_a_model_are_a_mistake(world, tmp_path, monkeypatch, name, remedy):
    monkeypatch.setattr(build, "all_gather_object", lambda mine, _: [mine, {name: "2.0"} if name in mine else mine])
    settings = write_rows(tmp_path)
    with pytest.raises(AgreedError, match=rf"^rank 1 has {name} 2\.0 \(rank 0: \S+\): {remedy}$"):
        build_model(settings, build_data(settings, world), world)


def test_all_ranks_pad_on_the_side_that_rank_0_has_found(world, tmp_path, monkeypatch):
    settings = write_rows(tmp_path)
    data = build_data(settings, world)
    monkeypatch.setattr(build, "broadcast_object", lambda make, _: {"right": "left"}[make()])  # the answer of rank 0
    build_model(settings, data, world)
    assert data.collator.tokenizer.padding_side == "left"


def test_all_nodes_train_and_predict_with_the_weights_of_rank_0():
    def weights(world):
        config = BertConfig(vocab_size=9, hidden_size=2, num_hidden_layers=1, num_attention_heads=1)
        model = BertForSequenceClassification(config)
        model.load_state_dict({name: torch.full_like(w, world.rank) for name, w in model.state_dict().items()})
        agree_on_model(model, Dataset.from_dict({"input_ids": [[1]]}), learn_tokenizer(["a"], 9), world=world)
        return {value for parameter in model.parameters() for value in parameter.flatten().tolist()}

    assert on_ranks(weights, 2, inside=1) == [{0.0}, {0.0}]


@pytest.mark.parametrize("mistake", ["a token of a review", "the padding token"])
def test_tokens_without_an_embedding_are_a_mistake(world, tmp_path, mistake):
    settings = write_rows(tmp_path)
    data = build_data(settings, world)
    build_model(settings, data, world)
    missing = max(map(max, data.rows["input_ids"]))
    if mistake == "the padding token":
        missing = len(data.tokenizer)
        data.tokenizer.add_special_tokens({"pad_token": "[NEW]"})
    config = AutoConfig.from_pretrained(settings.model)
    config.vocab_size = missing
    config.save_pretrained(settings.model)
    message = f"returns token id {missing}, but its config has vocab_size {missing}: resize"
    with pytest.raises(AgreedError, match=message):
        build_model(settings, data, world)


def test_reviews_without_tokens_are_a_mistake(world, tmp_path):
    settings = write_rows(tmp_path, "好", "\u200b", "𓀀", "\u200b\u200b")
    build_model(settings, build_data(settings, world), world)  # they have special tokens
    tokenizer = PreTrainedTokenizerFast.from_pretrained(settings.model)
    tokenizer.backend_tokenizer.normalizer = normalizers.BertNormalizer()  # removes zero-width spaces
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    tokenizer.save_pretrained(settings.model)
    assert tokenizer("𓀀")["input_ids"] == [tokenizer.unk_token_id], "an unknown token is a token"
    with pytest.raises(AgreedError, match=r"its tokenizer returns no token for rows 41, 43 \("):
        build_model(settings, build_data(settings, world), world)


def test_special_tokens_in_a_review_are_those_of_the_tokenizer_and_another_end_is_a_mistake(world, tmp_path):
    settings = write_rows(tmp_path, "[MASK]好", "好", model="bart")
    data, plain = build_data(settings, world), AutoTokenizer.from_pretrained(settings.model)
    assert data.rows["input_ids"][40] == plain("[MASK]好")["input_ids"]
    settings = write_rows(tmp_path, "[SEP]", "好[SEP]好", model="bart")  # it reads its logits at this token
    with pytest.raises(AgreedError, match=r"exactly once per text, unlike in rows 40, 41 .*: remove it, such"):
        build_model(settings, build_data(settings, world), world)


def test_a_run_says_which_reviews_several_parts_have(world, tmp_path, capsys):
    settings = write_rows(tmp_path)  # the same review in all rows
    os.close(prepare("ddp_loop", replace(settings, output_dir=str(tmp_path / "run")), world).lock)
    assert "4 test reviews also occur in train rows" in capsys.readouterr().out
