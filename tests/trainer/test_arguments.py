"""Trainer's arguments. It trains with them in tests/launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel, Trainer, TrainingArguments

from app.trainer.arguments import TrainingArgumentsWithoutPlacement


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
