"""Loading models of several architectures from local folders."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.architectures import CONFIGS, write_model
from helpers.run_folders import edit_json
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForTokenClassification,
    FunnelConfig,
)

from app.common.errors import UserError
from app.model.dropout import checkpoint_activations, override_dropout
from app.model.inputs import describe_tokenizer_file
from app.model.load import Classifier, is_pretrained, load_classifier, load_tokenizer
from app.settings import Settings

TEXTS = ["差，第一次好。", "好。第2次"] * 20
MPT = {"model_type": "mpt", "n_heads": 2, "max_position_embeddings": None, "max_seq_len": 16}
LAYERDROP, REFORMER = {"layerdrop": 0.1}, {"model_type": "reformer", "attn_layers": ["local"], "axial_pos_embds": False}


@pytest.fixture
def folder(tmp_path) -> Callable[..., Path]:
    """Write a model folder with a config and a tokenizer, and optionally weights."""

    def write(name: str = "bert", weights: bool = False, **changes: Any) -> Path:
        path = write_model(tmp_path / name, name)
        edit_json(path / "config.json", **changes)
        if weights:
            AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(path)).save_pretrained(path)
        return path

    return write


def load(model: Path | str, classes: Sequence[str] = "ab", **settings: Any) -> Classifier:
    chosen = Settings(model=str(model), **{"max_length": 32} | settings)
    return load_classifier(chosen, list(classes), load_tokenizer(chosen, TEXTS))


def error_message(model: Path | str, **settings: Any) -> str:
    """Return the one-line message of the UserError that loading raises."""
    with pytest.raises(UserError) as caught:
        load(model, **settings)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("weights", [False, True])
def test_any_architecture_becomes_a_classifier_for_the_classes_of_the_data(folder, name, weights):
    settings = Settings(model=str(folder(name, weights)), max_length=32, dropout=0.0)
    edit_json(Path(settings.model, "tokenizer_config.json"), model_input_names=["input_ids", "token_type_ids"])
    tokenizer = load_tokenizer(settings, TEXTS)
    classifier = load_classifier(settings, ["bad", "good", "mixed"], tokenizer)
    model = classifier.model
    assert is_pretrained(settings.model) is weights
    assert model.config.id2label == {0: "bad", 1: "good", 2: "mixed"}
    # Trainer would change special tokens later, when the embeddings have their `padding_idx`.
    assert model.get_input_embeddings().padding_idx in (None, tokenizer.pad_token_id)
    for special in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(model.config, special) == getattr(tokenizer, special)
    assert all(module.p == 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))
    batch = tokenizer(TEXTS[:4], padding=True, return_tensors="pt")
    assert set(batch) <= inspect.signature(model.forward).parameters.keys(), "the model does not accept all inputs"
    assert ("attention_mask" in batch) == (name != "fnet"), "padding would count as text"
    outputs = [model.train()(**batch, labels=torch.tensor([0, 1, 2, 0])) for _ in range(2)]
    assert outputs[0].logits.shape == (4, 3)
    assert torch.equal(outputs[0].logits, outputs[1].logits), "something is dropped"


def test_layerdrop_and_switches_are_not_overridden_as_dropout(folder):
    load(folder("bert", **LAYERDROP), ddp_find_unused_parameters=True)
    config = BertConfig()
    config.encoder_layerdrop, config.use_dropout_anywhere = 0.2, True
    override_dropout(config, 0.3)
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob, config.classifier_dropout) == (0.3,) * 3
    assert (config.encoder_layerdrop, config.use_dropout_anywhere) == (0.2, True)
    override_dropout(pair := AutoConfig.for_model("t5gemma"), 0.3)
    assert (pair.encoder.dropout_rate, pair.decoder.attention_dropout, pair.classifier_dropout_rate) == (0.3,) * 3


def test_weights_come_from_the_folder_or_are_initialized_from_the_seed(folder):
    def weights(model: Path | str, **settings: Any) -> dict[str, torch.Tensor]:
        return load(model, **settings).model.state_dict()

    def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
        return [name for name in a if a[name].shape != b[name].shape or not torch.equal(a[name], b[name])]

    for model in ("tiny", folder("bert")):
        assert not differing(weights(model), weights(model))
        assert differing(weights(model), weights(model, seed=1))
        assert load(model).origin.startswith(f"{model}, initialized from the seed")
    path = folder("electra", weights=True)
    stored = AutoModelForSequenceClassification.from_pretrained(path).state_dict()
    assert not differing(weights(path), stored)
    head = ["classifier.out_proj.weight", "classifier.out_proj.bias"]
    assert differing(weights(path, classes="abcde"), stored) == head, "a head for other classes"
    assert not differing(weights(path, classes="abcde"), weights(path, classes="abcde"))
    save_file({name: weight.fill_(torch.nan) for name, weight in stored.items()}, path / "model.safetensors")
    assert "its logits are not finite: do its weights have NaN?" in error_message(path)


# An architecture, changes of its config, settings, and the message. Add a row for another model that cannot be trained.
MISTAKES = [
    ("bert", LAYERDROP, {}, "use --strategy ddp or zero1 with --ddp_find_unused_parameters"),
    ("bert", LAYERDROP, {"ddp_find_unused_parameters": True, "strategy": "zero3"}, "use --strategy ddp or zero1"),
    ("roberta", {}, {"max_length": 66}, "accepts at most 65"),  # its positions start after the padding id, 0
    ("fnet", {}, {"attn_implementation": "sdpa"}, r"another --attn_implementation: FNet\w+ does not"),
    ("roberta", {"model_type": "layoutlmv3"}, {"max_length": 66}, "accepts at most 65"),
    ("roberta", {"model_type": "mpnet"}, {"max_length": 65}, "accepts at most 64"),  # they start at 2
    ("bert", MPT, {}, "accepts at most 16"),
    ("bert", {}, {"attn_implementation": "flash_attention_2"}, "another --attn_implementation: FlashAttention2"),
    ("bert", REFORMER, {}, "a Reformer recomputes layers with other dropout masks"),
    ("bert", {"model_type": "mra"}, {}, "logits are the same for every text"),  # it needs a CUDA kernel
]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(("name", "changes", "settings", "message"), MISTAKES)
def test_a_model_that_cannot_be_trained_is_one_line(folder, name, weights, changes, settings, message):
    assert re.search(message, error_message(folder(name, weights, **changes), **settings))


def test_a_model_whose_code_fails_is_one_line(folder, monkeypatch):
    monkeypatch.setattr(BertModel, "forward", lambda *_, **__: len(0))
    assert "its forward() fails: object of type 'int'" in error_message(folder("bert"))


def test_texts_of_the_same_tokens_may_have_the_same_logits(folder, monkeypatch):
    path, forward = folder("bert"), BertForSequenceClassification.forward

    def of_the_first_token(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return forward(self, input_ids[:, :1])

    monkeypatch.setattr(BertForSequenceClassification, "forward", of_the_first_token)
    assert "its logits are the same for every text" in error_message(path)  # which all begin with [CLS]
    monkeypatch.setattr("app.model.inputs.TEXTS", ("差差差", "差"))
    load(path)


def test_only_the_settings_turn_on_checkpointing_which_old_code_cannot_do_with_equal_masks(folder, monkeypatch):
    path = folder("bert", gradient_checkpointing=True, output_attentions=True)
    model = load(path).model
    assert not model.is_gradient_checkpointing
    assert not model.config.output_attentions
    checkpoint_activations(model)
    assert model.is_gradient_checkpointing
    monkeypatch.setattr(BertModel, "_set_gradient_checkpointing", lambda self, module, value=False: None)
    with pytest.raises(UserError, match="BertModel does not support it"):
        checkpoint_activations(BertModel(model.config))


def test_files_and_impossible_names_are_no_models(tmp_path):
    (tmp_path / "file.txt").touch()
    assert f"{tmp_path}/file.txt: is not a model folder" in error_message(tmp_path / "file.txt")
    assert "no such name!: no such folder, and no such model" in error_message("no such name!")


EVIL = '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}'


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("pytorch_model.bin", b"garbage", "pytorch_model.bin .* is damaged"),
        ("pytorch_model.bin", b"", "pytorch_model.bin .* is damaged"),
        ("pytorch_model.bin", pickle.dumps(error_message), "is damaged, or holds more than weights"),
        ("model.safetensors.index.json", '{"metadata": {}, "weight_map": {}}', "its model cannot be loaded"),
        ("model.safetensors", b"garbage", "its model cannot be loaded"),
        ("tf_model.h5", b"weights", r"weights in \S+/tf_model.h5 are not read: save them as \S+/model.safetensors"),
        ("model-q8_0.gguf", b"weights", r"weights in \S+/model-q8_0.gguf are not read"),
        ("part/model.safetensors", b"weights", r"weights in \S+/part/model.safetensors are not read"),
        ("onnx/model.onnx", b"weights", r"weights in \S+/onnx/model.onnx are not read"),
        ("adapter_config.json", "{}", "adapter_config.json belongs to an adapter: .* merge_and_unload"),
        ("tokenizer.json", "[]", "its tokenizer cannot be loaded"),
        ("tokenizer_config.json", "[" * 100_000, "its tokenizer cannot be loaded"),
        ("tokenizer_config.json", '{"model_max_length": "many"}', "in its tokenizer_config.json is no number: 'many'"),
        ("tokenizer_config.json", '{"model_max_length": NaN}', "in its tokenizer_config.json is no number: nan"),
        ("config.json", "3", "cannot be loaded"),
        ("config.json", '{"model_type": "no-such-type"}', "no-such-type"),
        ("config.json", EVIL, "its config cannot be loaded: .* --trust_remote_code runs it"),
        ("config.json", '{"model_type": "bert", "num_attention_heads": 0}', "by zero"),
    ],
)
def test_a_file_of_a_model_that_cannot_be_used_is_one_line(folder, name, content, problem):
    path = folder("bert")
    (path / "evil.py").write_text("raise SystemExit('code of the model was run')")
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    message = error_message(path)
    assert re.search(problem, message)
    assert str(path) in message
    assert "weights_only" not in message, "it would run the code in the file"


@pytest.mark.parametrize(
    ("name", "prefix", "changes", "message"),
    [
        ("bert", "", {"hidden_size": 64}, r"weights bert\.\S+ have the shape"),
        ("bert", "", {"num_hidden_layers": 3}, r"weights bert\.\S+ are missing"),
        ("bert", "module.", {}, r"embeddings.weight are missing, but there are module.bert.embeddings.LayerNorm.bias"),
        ("roberta", "", {"pad_token_id": 1}, "positions count from pad_token_id 1, but its tokenizer pads with 0"),
    ],
)
def test_weights_of_another_config_or_a_wrapper_are_rejected(folder, name, prefix, changes, message):
    path = folder(name, weights=True)
    file = path / "model.safetensors"
    save_file({prefix + name: weight for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})
    edit_json(path / "config.json", **changes)
    assert re.search(message, error_message(path))


def test_only_the_head_of_a_model_may_be_new_and_is_named(folder):
    path = folder("bert")
    BertForMaskedLM(AutoConfig.from_pretrained(path)).save_pretrained(path)  # it has no pooler
    new = "bert.pooler.dense.weight, bert.pooler.dense.bias, classifier.weight, classifier.bias"
    assert load(path).origin == f"{path}; new weights: {new}"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_trained_head_with_the_classes_in_another_order_keeps_their_meaning(folder, name):
    path = folder(name, weights=True, id2label={0: "mixed", 1: "Good", 2: "bad"})
    classifier, plain = load(path, ["bad", "good", "mixed"]), AutoModelForSequenceClassification.from_pretrained(path)
    ids, plain.config.eos_token_id = torch.tensor([[2, 5, 6, 7, 3]]), 3
    with torch.no_grad():
        assert torch.allclose(classifier.model.eval()(ids).logits, plain(ids).logits[:, [2, 1, 0]], atol=1e-6)
    assert "trained for" not in classifier.origin
    others = load(path, ["bad", "great", "mixed"])  # "great" gets the output that is left
    assert "; keeps its head, which was trained for the classes 'mixed', 'Good', 'bad'" in others.origin
    assert others.model.state_dict()[[*plain.state_dict()][-1]].equal([*plain.state_dict().values()][-1].flip(0))


def test_the_head_of_a_distilbert_for_tokens_is_named_beside_its_new_layer(folder):
    config = DistilBertConfig(dim=32, n_layers=1, n_heads=2, hidden_dim=32, vocab_size=256, num_labels=2)
    DistilBertForTokenClassification(config).save_pretrained(path := folder("bert"))
    told = "keeps its head, which was trained for the classes 'LABEL_0', 'LABEL_1'; keeps the head of DistilBertForT"
    assert f"new weights: pre_classifier.weight, pre_classifier.bias; {told}" in load(path).origin


def test_a_trained_head_with_default_names_that_the_data_has_too_keeps_their_meaning(folder):
    path, names = folder("bert", weights=True, num_labels=11), [f"LABEL_{index}" for index in range(11)]
    weight, in_order = (load(path, classes).model.classifier.weight for classes in (names, sorted(names)))
    assert "keeps its head, which was trained for the classes 'LABEL_0'" in load(path, [*"abcdefghijk"]).origin
    assert in_order.equal(weight[[names.index(name) for name in sorted(names)]])
    edit_json(path / "config.json", label2id={name: index for index, name in enumerate("kjihgfedcba")})
    assert load(path, [*"abcdefghijk"]).model.classifier.weight.equal(weight.flip(0)), "they are in label2id"


def test_weights_that_the_model_does_not_use_and_what_its_head_was_trained_for_are_named(folder):
    path = folder("bert", weights=True, id2label={0: "good", 1: 1})
    weights = load_file(path / "model.safetensors")
    some = {name: weight for name, weight in weights.items() if not re.search("pooler|classifier.bias", name)}
    save_file(some, path / "model.safetensors", metadata={"format": "pt"})
    other = "BertForTokenClassification"
    edit_json(path / "config.json", num_hidden_layers=1, problem_type="regression", architectures=[other])
    classifier, head = load(path, ["1", "good"]), "; keeps its head, which was trained for "
    assert classifier.model.classifier.weight.equal(weights["classifier.weight"][[1, 0]]), "in the order of the classes"
    unused = "; unused weights: bert.encoder.layer.1.attention.output.LayerNorm.bias and 15 more"
    told = f"{head}regression; keeps the head of {other}{unused}"
    assert classifier.origin.endswith(f"bert.pooler.dense.bias, classifier.bias{told}")
    edit_json(path / "config.json", id2label={0: "good", 1: 1, 2: "old"})
    for name in ("pytorch_model.bin", "model-00001-of-00002.safetensors"):
        (path / name).touch()
    others = "; model-00001-of-00002.safetensors is not read; pytorch_model.bin is not read"
    assert load(path, ["1", "good"]).origin.endswith(others)
    assert f"{head}the classes 'good', '1', 'old'" in load(path, ["1", "good"]).origin


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_has_the_same_logits_alone_and_beside_a_longer_row(folder, name, side):
    settings = Settings(model=str(folder(name)), max_length=32)
    tokenizer = load_tokenizer(settings, TEXTS)
    tokenizer.padding_side = side
    classifier = load_classifier(settings, ["bad", "good"], tokenizer)
    with torch.no_grad():
        alone, beside = (
            classifier.model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[0]
            for texts in (TEXTS[:1], [TEXTS[0], TEXTS[0] * 3])
        )
    depends = "; its logits depend on how far a batch is padded" in classifier.origin
    assert torch.allclose(alone, beside, rtol=1e-4, atol=1e-6) is not depends
    assert depends is (name == "fnet"), "its Fourier transform has no mask"


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="it is installed")
def test_a_tokenizer_that_needs_sentencepiece_says_so(folder):
    path = folder("bert")
    (path / "tokenizer.json").rename(path / "spm.model")
    edit_json(path / "tokenizer_config.json", tokenizer_class="DebertaV2Tokenizer")
    assert error_message(path).endswith("pip install sentencepiece")


@pytest.mark.parametrize(("recipe", "token", "token_id"), [({"post_processor": None}, "[SEP]", 3), ({}, "[CLS]", 2)])
def test_a_tokenizer_without_a_padding_token_pads_with_one_that_does_not_end_each_text(folder, recipe, token, token_id):
    path = folder("gpt2")
    edit_json(path / "tokenizer_config.json", pad_token=None)
    edit_json(path / "tokenizer.json", **recipe)
    classifier = load(path)
    assert classifier.model.config.pad_token_id == token_id
    assert classifier.origin.endswith(f"; padded with its token {token}")
    edit_json(path / "config.json", model_type="funnel")  # which would set the embedding of that token to zero
    assert "its tokenizer has no padding token" in error_message(path)


def test_a_tokenizer_file_of_which_transformers_uses_a_part_is_named(folder):
    path = folder("bert")
    settings = Settings(model=str(path))
    assert describe_tokenizer_file(load_tokenizer(settings, TEXTS), settings, TEXTS) is None
    edit_json(path / "tokenizer.json", normalizer={"type": "Replace", "pattern": {"String": "好"}, "content": "差"})
    edit_json(path / "tokenizer_config.json", tokenizer_class="BertTokenizer")  # which has a normalizer of its own
    told = describe_tokenizer_file(load_tokenizer(settings, TEXTS), settings, [*TEXTS, "差"])
    assert "of tokenizer.json: 40 of the first 41 reviews would have other tokens" in str(told)


def test_a_padding_token_that_the_embeddings_lack_is_one_line(folder):
    path = folder("gpt2", weights=True)
    tokenizer, size = AutoTokenizer.from_pretrained(path), AutoConfig.from_pretrained(path).vocab_size
    tokenizer.add_tokens([f"word{i}" for i in range(size - len(tokenizer))])
    tokenizer.add_special_tokens({"pad_token": "[NEW]"})
    tokenizer.save_pretrained(path)
    edit_json(path / "config.json", pad_token_id=None)
    assert f"token id {size}, but its config has vocab_size {size}: resize the model's" in error_message(path)


def test_a_config_without_a_padding_token_gets_that_of_the_tokenizer(folder):
    perceiver = folder(model_type="perceiver", d_latents=32, num_self_attends_per_block=1)
    assert load(perceiver).model.config.pad_token_id == 0
    funnel = FunnelConfig(vocab_size=256, block_sizes=[1, 1], d_model=16, n_head=2, d_head=8, d_inner=16)
    stored = AutoModelForSequenceClassification.from_config(funnel)
    stored.save_pretrained(path := folder("bert"))
    model = load(path).model
    assert model.config.pad_token_id == 0
    assert model.get_input_embeddings().weight.equal(stored.get_input_embeddings().weight), "no row became 0"


def test_a_short_text_does_not_change_the_attention_of_a_bigbird(folder):
    classifier = load(folder(model_type="big_bird", attention_type="block_sparse", block_size=2, num_random_blocks=1))
    long, _, again = (classifier.model(torch.full((1, width), 5)).logits for width in (32, 3, 32))
    assert again.equal(long)
    assert classifier.origin.endswith("; with full attention")
