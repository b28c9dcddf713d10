"""Trainer's engines and arguments, and the modules that its FSDP2 shards. They train in tests/launched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.architectures import CONFIGS
from helpers.worlds import batch_plan, fake_world
from transformers import (
    AlbertConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from app.settings import Settings
from app.trainer.deepspeed_engine import DeepSpeed
from app.trainer.engine import TrainerEngine, TrainerFSDP, TrainingArgumentsWithoutPlacement, fsdp_config

ALBERT = AlbertConfig(
    embedding_size=16, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32
)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("bert", ["BertLayer"]), ("gpt2", ["GPT2Block"]), ("bart", ["BartDecoderLayer", "BartEncoderLayer"])],
)
def test_accelerate_shards_the_layers_but_not_embeddings_that_it_shards_itself(name, blocks):
    config = copy.deepcopy(CONFIGS[name])
    config.vocab_size = 50
    config = fsdp_config(AutoModelForSequenceClassification.from_config(config))
    assert config["transformer_layer_cls_to_wrap"] == blocks
    assert (config["version"], config["reshard_after_forward"]) == (2, True)


def test_a_model_without_blocks_is_sharded_as_a_whole():
    config = fsdp_config(AutoModelForSequenceClassification.from_config(ALBERT))
    assert config["auto_wrap_policy"] == "NO_WRAP"
    assert "transformer_layer_cls_to_wrap" not in config


def test_the_model_is_never_placed_on_the_device_as_a_whole(monkeypatch):
    """It may not fit there."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the complete model is moved")

    model = AutoModelForSequenceClassification.from_config(copy.deepcopy(CONFIGS["bert"]))
    monkeypatch.setattr(PreTrainedModel, "to", refuse)
    strategy = TrainerFSDP(Settings(fsdp=True), batch_plan(), fake_world(1, 2))
    assert strategy.wrap(model) is model


@pytest.mark.parametrize(("flags", "kind"), [({"deepspeed": "ds.json"}, DeepSpeed), ({"fsdp": True}, TrainerFSDP)])
def test_the_flags_of_trainers_engines_select_them(flags, kind):
    plan = batch_plan(2, 4)
    settings = Settings(**flags)
    assert settings.trainer_engine
    strategy = TrainerEngine().select_strategy(settings, plan, fake_world(1, 2))
    assert type(strategy) is kind
    assert not Settings().trainer_engine
    assert sorted(strategy.logical_ranks) == ([2, 3] if kind is DeepSpeed else [1, 3])


@pytest.mark.parametrize(("arguments", "moves"), [(TrainingArguments, 1), (TrainingArgumentsWithoutPlacement, 0)])
def test_trainer_leaves_the_model_where_it_is(monkeypatch, tmp_path, arguments, moves):
    """Under `zero2` and `zero3` the complete model need not fit on the device."""
    moved = []

    def to(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        moved.append(model)
        return model

    monkeypatch.setattr(PreTrainedModel, "to", to)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(**size, vocab_size=8))
    Trainer(model=model, args=arguments(output_dir=str(tmp_path), use_cpu=True, report_to="none"))
    assert len(moved) == moves
