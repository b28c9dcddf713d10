"""Mistakes that appear only when the data and the model meet."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from helpers.architectures import write_model
from transformers import BertConfig, GPT2Config

from app.common.errors import AgreedError
from app.data import reviews
from app.distributed.world import World
from app.record.run_folder import split_content
from app.settings import Settings
from app.training import build as build_module
from app.training.build import build_data, build_model
from app.training.prepare import prepare


def test_the_model_is_loaded_into_main_memory_whatever_the_device(world, review_csv, tmp_path):
    """A sharded model need not fit on one device."""
    settings = Settings(csv=str(review_csv()), cache_dir=str(tmp_path), max_length=32, use_cpu=True)
    model = build_model(settings, build_data(settings, world), replace(world, device=torch.device("meta"))).model
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}


def test_tokens_without_an_embedding_are_a_mistake(world, review_csv, tmp_path):
    model = write_model(tmp_path / "model", "bert")
    settings = Settings(model=str(model), csv=str(review_csv()), cache_dir=str(tmp_path), max_length=32, use_cpu=True)
    data = build_data(settings, world)
    build_model(settings, data, world)
    largest = max(map(max, data.rows["input_ids"]))
    config = BertConfig.from_pretrained(model)
    config.vocab_size = largest
    config.save_pretrained(model)
    message = f"returns token id {largest}, but its config has vocab_size {largest}: resize"
    with pytest.raises(AgreedError, match=message):
        build_model(settings, data, world)


def test_a_padding_token_without_an_embedding_is_a_mistake(world, review_csv, tmp_path):
    model = write_model(tmp_path / "model", "gpt2")
    settings = Settings(model=str(model), csv=str(review_csv()), cache_dir=str(tmp_path), max_length=32, use_cpu=True)
    data = build_data(settings, world)
    config = GPT2Config.from_pretrained(model)
    config.vocab_size = len(data.tokenizer)
    config.save_pretrained(model)
    data.tokenizer.add_special_tokens({"pad_token": "[NEW]"})
    with pytest.raises(AgreedError, match=f"token id {config.vocab_size}, but its config has vocab_size"):
        build_model(settings, data, world)


def test_reviews_in_several_parts_are_counted_once_for_all_that_name_them(world, review_csv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    counted = []

    def count(table, split) -> dict[str, int]:
        counted.append(split)
        return {"test_in_train": 7, "test_in_validation": 0, "validation_in_train": 0}

    monkeypatch.setattr(build_module, "count_duplicates", count)
    settings = Settings(csv=str(review_csv()), max_length=32, use_cpu=True, train_batch_size=4)
    lines: list[str] = []
    monkeypatch.setattr(World, "print_main", lambda world, line: lines.append(line))
    prepared = prepare("ddp_loop", settings, world)
    assert split_content(prepared)["duplicates"]["test_in_train"] == 7
    assert "7 test reviews also occur in train rows" in "\n".join(lines)
    os.close(prepared.lock)
    assert len(counted) == 1


def test_a_vocabulary_that_is_learned_from_a_sample_is_announced(world, review_csv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    monkeypatch.setattr(World, "print_main", lambda world, line: lines.append(line))
    for at_most in (54, 20):
        monkeypatch.setattr(reviews, "MAX_SAMPLE", at_most)
        settings = Settings(csv=str(review_csv(60)), max_length=16, use_cpu=True, train_batch_size=4)
        os.close(prepare("ddp_loop", settings, world).lock)
        assert ("tokenizer  learned from 18 of 54 training rows" in "\n".join(lines)) == (at_most == 20)
