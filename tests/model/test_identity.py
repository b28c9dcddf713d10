"""What a resumed run compares of a model."""

from __future__ import annotations

import json

import torch
from helpers.architectures import SMALL
from transformers import BertConfig, BertForSequenceClassification

from app.model.identity import describe_config, hash_code, match_classes


def test_a_config_with_values_that_json_does_not_have_can_be_recorded():
    content = describe_config(BertConfig(scale=float("inf"), offset=float("nan"), kind=object))
    assert json.loads(json.dumps(content, allow_nan=False)) == content


def test_the_code_of_a_model_counts_only_if_it_is_run(tmp_path):
    (tmp_path / "modeling.py").write_text("a = 1\n")
    before = hash_code(str(tmp_path), True)
    (tmp_path / "modeling.py").write_text("a = 2\n")
    assert before is not None
    assert hash_code(str(tmp_path), True) not in (before, None)
    assert hash_code(str(tmp_path), False) is None
    assert hash_code("org/name", True) is None


class CodeOfAFolder(BertForSequenceClassification):
    __module__ = "transformers_modules.model"


def test_a_head_in_a_models_own_code_is_not_permuted_but_named():
    model, ids = CodeOfAFolder(BertConfig(**SMALL, num_labels=3)).eval(), torch.tensor([[2, 5, 6, 7, 3]])
    before = model(ids).logits
    assert match_classes(model, "cab", "abc") == "; keeps its head, which was trained for the classes 'c', 'a', 'b'"
    assert model(ids).logits.equal(before)


def test_classes_that_differ_only_in_case_are_permuted():
    model = BertForSequenceClassification(BertConfig(**SMALL, num_labels=2))
    before = model.classifier.weight.detach().clone()
    assert match_classes(model, "aA", "Aa") == ""
    assert model.classifier.weight.equal(before.flip(0))
