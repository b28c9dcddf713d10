"""Trainer's arguments. It trains with them in tests/launched."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from app.trainer.arguments import TrainingArgumentsWithoutPlacement


def test_trainer_leaves_the_model_where_it_is(tmp_path):
    """Under `zero2` and `zero3` the complete model need not fit on the device."""
    options = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    with torch.device("meta"):  # from which nothing can be moved
        model = BertForSequenceClassification(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    Trainer(model=model, args=TrainingArgumentsWithoutPlacement(**options))
    with pytest.raises(NotImplementedError, match="meta tensor"):
        Trainer(model=model, args=TrainingArguments(**options))
