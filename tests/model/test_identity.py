"""What a resumed run compares of a model."""

from __future__ import annotations

import json

from transformers import BertConfig

from app.model.identity import describe_config, hash_code


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
