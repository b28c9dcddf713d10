"""Models by name, by folder and of the benchmark's own sizes."""

from __future__ import annotations

import pytest
import torch
from helpers.architectures import CONFIGS

from app.bench.scaling.models import build_classifier, check_length, model_config
from app.common.errors import UserError
from app.settings import Settings


def test_a_folder_needs_no_weights(tmp_path):
    CONFIGS["gpt2"].save_pretrained(tmp_path)
    first, second = (build_classifier(str(tmp_path), Settings(use_cpu=True)) for _ in range(2))
    assert first.config.num_labels == 2
    assert first(torch.ones(2, 4, dtype=torch.int64), labels=torch.tensor([0, 1])).loss > 0
    assert all(map(torch.equal, first.parameters(), second.parameters())), "the same weights on every rank"


@pytest.mark.parametrize(("name", "layers"), [("BERT 4 x 312", 4), ("tiny", 1), ("tiny-bert", 2)])
def test_a_model_by_name(name, layers):
    assert model_config(name, use_cpu=True).num_hidden_layers == layers


def test_rows_that_are_too_long_are_one_line():
    config = model_config("tiny-bert", use_cpu=True)
    check_length(config, 512)
    with pytest.raises(UserError, match="--length 513: must be at most 512, the positions that the model has"):
        check_length(config, 513)
