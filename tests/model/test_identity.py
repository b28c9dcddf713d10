"""What is recorded about a model, so that a resumed run notices that it has changed."""

from __future__ import annotations

import json

from helpers.architectures import CONFIGS
from transformers import BertConfig

from app.model.identity import changed_keys, describe_config, hash_code


def test_every_config_can_be_recorded_and_read_back():
    for config in (*CONFIGS.values(), BertConfig(scale=float("inf"), offset=float("nan"), kind=object)):
        content = describe_config(config)
        assert json.loads(json.dumps(content, allow_nan=False)) == content
        assert changed_keys(content, describe_config(config)) == []


def test_the_code_of_a_model_counts_only_if_it_is_run(tmp_path):
    (tmp_path / "modeling.py").write_text("a = 1\n")
    before = hash_code(str(tmp_path), True)
    (tmp_path / "modeling.py").write_text("a = 2\n")
    assert before is not None
    assert hash_code(str(tmp_path), True) not in (before, None)
    assert hash_code(str(tmp_path), False) is None
    assert hash_code("org/name", True) is None
