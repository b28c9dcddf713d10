"""Models of several architectures in folders that the test writes, as a user's own would be."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    ElectraConfig,
    ErnieConfig,
    ModernBertConfig,
    RobertaConfig,
)

from app.errors import UserError
from app.model.load import load_classifier, load_tokenizer, longest_input, override_dropout
from app.model.tiny_bert import learn_tokenizer
from app.settings import Settings

TEXTS = ["房间很干净，服务很好。", "早餐太差，再也不来。"] * 20
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
CONFIGS = {
    "bert": BertConfig(**SMALL),
    "roberta": RobertaConfig(**SMALL, max_position_embeddings=66, pad_token_id=1),
    "electra": ElectraConfig(**SMALL, embedding_size=32),
    "ernie": ErnieConfig(**SMALL),
    "modernbert": ModernBertConfig(**SMALL, pad_token_id=0, cls_token_id=2, sep_token_id=3),
    "distilbert": DistilBertConfig(dim=32, n_layers=1, n_heads=2, hidden_dim=32),
}


@pytest.fixture
def tokenizer():
    return learn_tokenizer(TEXTS)


@pytest.fixture
def folder(tmp_path, tokenizer):
    """Writes a model folder: config and tokenizer, and weights if asked for."""

    def write(name: str = "bert", weights: bool = False, **changes):
        config = CONFIGS[name].__class__(**(CONFIGS[name].to_diff_dict() | {"vocab_size": len(tokenizer)} | changes))
        path = tmp_path / name
        if weights:
            AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
        config.save_pretrained(path)
        tokenizer.save_pretrained(path)
        return str(path)

    return write


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("weights", [False, True])
def test_any_architecture_becomes_a_classifier_of_the_data_s_classes(folder, name, weights):
    settings = Settings(model=folder(name, weights), max_length=32)
    tokenizer = load_tokenizer(settings, TEXTS)
    loaded = load_classifier(settings, ["bad", "good", "mixed"], tokenizer)
    assert loaded.pretrained is weights
    assert loaded.model.config.id2label == {0: "bad", 1: "good", 2: "mixed"}
    assert loaded.model.accepts_loss_kwargs is False, "Trainer would inflate loss and gradients"
    batch = tokenizer(TEXTS[:4], padding=True, return_tensors="pt")
    output = loaded.model(**batch, labels=torch.tensor([0, 1, 2, 0]))
    assert output.logits.shape == (4, 3)
    assert output.loss.ndim == 0


def test_weights_come_from_the_folder_or_else_from_the_seed(folder):
    def weights(**settings):
        chosen = Settings(max_length=32, **settings)
        tokenizer = load_tokenizer(chosen, TEXTS)
        return load_classifier(chosen, ["0", "1"], tokenizer).model.state_dict()

    def equal(a, b):
        return all(torch.equal(a[name], b[name]) for name in a)

    for model in ("tiny", folder("bert")):
        assert equal(weights(model=model), weights(model=model))
        assert not equal(weights(model=model), weights(model=model, seed=1))
    path = folder("electra", weights=True)
    stored = AutoModelForSequenceClassification.from_pretrained(path).state_dict()
    assert equal(weights(model=path), stored)


def test_a_head_of_other_classes_is_replaced_from_the_seed(folder):
    settings = Settings(model=folder("bert", weights=True), max_length=32)
    tokenizer = load_tokenizer(settings, TEXTS)
    one, two = (load_classifier(settings, list("abcde"), tokenizer).model for _ in range(2))
    assert one.classifier.out_features == 5
    assert torch.equal(one.classifier.weight, two.classifier.weight)


@pytest.mark.parametrize("name", CONFIGS)
def test_dropout_overrides_every_dropout(folder, name):
    settings = Settings(model=folder(name), max_length=32, dropout=0.0)
    model = load_classifier(settings, ["0", "1"], load_tokenizer(settings, TEXTS)).model
    assert all(module.p == 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))
    batch = load_tokenizer(settings, TEXTS)(TEXTS[:4], padding=True, return_tensors="pt")
    model.train()
    assert torch.equal(model(**batch).logits, model(**batch).logits)


def test_layerdrop_and_switches_are_no_dropout_probabilities():
    config = BertConfig()
    config.encoder_layerdrop, config.use_dropout_anywhere = 0.2, True
    override_dropout(config, 0.3)
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob, config.classifier_dropout) == (0.3,) * 3
    assert (config.encoder_layerdrop, config.use_dropout_anywhere) == (0.2, True)


def test_a_length_beyond_the_positions_is_one_line(folder, tokenizer):
    assert longest_input(CONFIGS["roberta"], tokenizer) == 64, "RoBERTa's positions start behind the padding id"
    assert "--max_length 65" in one_line(Settings(model=folder("roberta"), max_length=65))


def one_line(settings: Settings) -> str:
    with pytest.raises(UserError) as caught:
        load_classifier(settings, ["0", "1"], load_tokenizer(settings, TEXTS))
    assert len(str(caught.value).splitlines()) == 1
    assert settings.model in str(caught.value)
    return str(caught.value)


def test_what_is_no_model_is_one_line(tmp_path, folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "no such folder" in one_line(Settings(model=str(tmp_path / "none")))
    (tmp_path / "empty").mkdir()
    assert "config.json" in one_line(Settings(model=str(tmp_path / "empty")))
    (tmp_path / "file.txt").touch()
    assert "is a file" in one_line(Settings(model=str(tmp_path / "file.txt")))
    assert "local cache" in one_line(Settings(model="nobody/no-such-model"))
    one_line(Settings(model="no such name!"))
    broken = folder("bert")
    (tmp_path / "bert" / "config.json").write_text("{")
    one_line(Settings(model=broken))
    shutil.copy(tmp_path / "bert" / "tokenizer.json", tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "no-such-type"}')
    one_line(Settings(model=str(tmp_path / "empty")))


def test_damaged_weights_are_one_line(tmp_path, folder):
    path = folder("bert", weights=True)
    weights = tmp_path / "bert" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    one_line(Settings(model=path, max_length=32))


def test_code_of_a_model_is_never_run_unasked(folder, tmp_path):
    path = folder("bert")
    config = tmp_path / "bert" / "config.json"
    auto = '"auto_map": {"AutoConfig": "evil.Config", "AutoModelForSequenceClassification": "evil.Model"}, '
    config.write_text(
        config.read_text().replace('"model_type": "bert"', '"model_type": "evil"').replace("{", "{" + auto, 1)
    )
    (tmp_path / "bert" / "evil.py").write_text("raise SystemExit('code of the model was run')")
    one_line(Settings(model=path))


def test_weights_are_stored_and_read_as_safetensors(folder, tmp_path):
    path = folder("bert", weights=True)
    assert (tmp_path / "bert" / "model.safetensors").exists()
    assert isinstance(AutoModelForSequenceClassification.from_pretrained(path), BertForSequenceClassification)


@pytest.mark.parametrize("spread", [6e38, 1.0])
def test_an_infinite_loss_is_in_the_gradients_norm_and_a_finite_one_is_not_changed(folder, tokenizer, spread):
    model = load_classifier(Settings(model=folder(), dropout=0.0), ["bad", "good"], tokenizer).model
    with torch.no_grad():
        model.classifier.bias.copy_(torch.tensor([spread / 2, -spread / 2]))
    outputs = model(**tokenizer("差", return_tensors="pt"), labels=torch.tensor([1]))
    assert outputs.loss.equal(torch.nn.functional.cross_entropy(outputs.logits, torch.tensor([1]))) == (spread == 1.0)
    outputs.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert torch.isfinite(norm) == (spread == 1.0)
