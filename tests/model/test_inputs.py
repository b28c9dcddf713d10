"""The inputs of a model: the same bits as with the mask of the batch, and no wait of the host for a GPU."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from helpers.architectures import CONFIGS, SMALL, write_model
from helpers.run_folders import edit_json
from helpers.worlds import fake_world
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from app.common.errors import UserError
from app.model.inputs import BIDIRECTIONAL, to_device
from app.model.load import load_classifier, load_tokenizer
from app.settings import Settings

LISTED = {name.split(".")[2] for name in BIDIRECTIONAL}
SIZES = SMALL | {"embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32}  # where there are any
FURTHER = {name: AutoConfig.for_model(name.replace("_", "-"), **SIZES) for name in sorted(LISTED - CONFIGS.keys())}
LENGTH, VOCABULARY, PAD = 37, 60, 1


def classifier(name: str, **changes: Any) -> PreTrainedModel:
    config = copy.deepcopy((CONFIGS | FURTHER)[name])
    config.vocab_size, config.pad_token_id, config.eos_token_id = VOCABULARY, PAD, 2
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)
    return model


def batch_of(name: str, lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (len(lengths), LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    ids[~mask] = PAD
    for row, length in enumerate(lengths):
        ids[row, length - 1] = 2  # BART and T5 classify the end of the text
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.arange(len(lengths)) % 2}
    if name == "fnet":
        del batch["attention_mask"]
    return batch


def results(model: PreTrainedModel, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the logits, the loss and all gradients."""
    model.zero_grad()
    torch.manual_seed(2)  # dropout
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        outputs = model(**batch)
    outputs.loss.backward()
    return [outputs.logits, outputs.loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("lengths", [(LENGTH, 20, 5, 30), (LENGTH,) * 4], ids=["padded", "full"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in (*CONFIGS, *FURTHER)),
        ("bert", {"_attn_implementation": "eager"}),
        ("bert", {"is_decoder": True}),
    ],
)
def test_results_are_bitwise_those_with_the_mask_of_the_batch(name, changes, lengths):
    model, batch = classifier(name, **changes), batch_of(name, lengths)
    prepared = to_device(batch, model, fake_world())
    for dtype, training in product((torch.float32, torch.bfloat16), (True, False)):
        model.train(training)
        expected, actual = results(model, batch, dtype), results(model, prepared, dtype)
        assert len(expected) == len(actual)
        assert all(map(torch.equal, expected, actual)), f"{dtype}, training: {training}"


CODE = """
from transformers import BertConfig, BertForSequenceClassification

class Config(BertConfig):
    model_type = "of-its-own"

class Model(BertForSequenceClassification):
    config_class = Config
    def forward(self, {0}):
        return super().forward({0})
"""


@pytest.mark.parametrize("inputs", ["*args, **kwargs", "input_ids, **kwargs", "input_ids, attention_mask", "ids"])
def test_code_from_a_models_folder_gets_the_inputs_that_it_accepts(tmp_path, monkeypatch, inputs):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    path, every = write_model(tmp_path / "model", "bert"), ["input_ids", "token_type_ids", "attention_mask"]
    (path / "code.py").write_text(CODE.format(inputs))
    plain = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(path)).eval()
    plain.save_pretrained(path)
    classes = {"AutoConfig": "code.Config", "AutoModelForSequenceClassification": "code.Model"}
    edit_json(path / "config.json", auto_map=classes, model_type="of-its-own")
    edit_json(path / "tokenizer_config.json", model_input_names=every)
    settings = Settings(model=str(path), max_length=32, trust_remote_code=True)
    tokenizer = load_tokenizer(settings, [])
    with pytest.raises(UserError, match=r"does not accept input_ids$") if inputs == "ids" else nullcontext():
        model = load_classifier(settings, "ab", tokenizer).model.eval()
        batch = tokenizer(["差，第一次好。", "好"], padding=True, return_tensors="pt")
        assert [*batch] == (every if "**" in inputs else ["input_ids", "attention_mask"])
        assert torch.allclose(model(**batch).logits, plain(**batch).logits, atol=1e-6)


@pytest.mark.parametrize("max_length", [40, 41])
def test_rotary_embeddings_that_change_with_the_length_of_a_batch_are_named(tmp_path, max_length):
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 40}
    rope = {"rope_type": "longrope", "rope_theta": 1e4} | factors
    path, settings = write_model(tmp_path / "model", "bert"), Settings(model=f"{tmp_path}/model", max_length=max_length)
    edit_json(path / "config.json", model_type="phi3", rope_parameters=rope, original_max_position_embeddings=40)
    origin = load_classifier(settings, "ab", load_tokenizer(settings, [])).origin
    assert origin.endswith("; its logits depend on how far a batch is padded") is (max_length > 40)


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({"model_type": "gemma", "head_dim": 16}, "eager"),
        ({"model_type": "gemma", "head_dim": 16, "use_bidirectional_attention": True}, "sdpa"),
        ({"model_type": "falcon", "alibi": False}, "eager"),
        ({"model_type": "falcon", "alibi": True}, "sdpa"),  # transformers' eager attention adds it twice
    ],
)
def test_a_model_with_other_logits_in_eager_attention_keeps_the_attention_of_pipeline(tmp_path, changes, chosen):
    path, ids = write_model(tmp_path / "model", "bert"), torch.tensor([[2, 5, 6, 7, 3]])
    edit_json(path / "config.json", num_key_value_heads=2, initializer_range=0.3, **changes)
    AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(path)).save_pretrained(path)
    expected = AutoModelForSequenceClassification.from_pretrained(path).eval()(ids).logits
    for requested in (None, "eager"):
        settings = Settings(model=str(path), max_length=32, attn_implementation=requested)
        model = load_classifier(settings, "ab", load_tokenizer(settings, [])).model
        assert model.config._attn_implementation == (requested or chosen)
        agrees = torch.allclose(model(ids).logits, expected, rtol=1e-4, atol=1e-6)
        assert agrees is (requested is None or chosen == "eager")


class WithoutHostReads(TorchDispatchMode):
    """Refuse operations for whose result the host would wait on a GPU."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert operation not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        assert not (operation is torch.ops.aten.index.Tensor and args[1][0].dtype is torch.bool)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", sorted(LISTED - {"megatron_bert"}))
def test_the_forward_pass_reads_no_value_of_the_mask(name):
    model = classifier(name)
    for lengths in ((LENGTH, 20), (LENGTH, LENGTH)):
        batch = batch_of(name, lengths)
        prepared = to_device(batch, model, fake_world())
        with WithoutHostReads():
            model(**prepared)
        with pytest.raises(AssertionError), WithoutHostReads():
            model(**batch)
