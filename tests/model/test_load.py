"""Loading models of several architectures from local folders and from the Hub's cache."""

from __future__ import annotations

import pickle
import re
import shutil
from importlib.util import find_spec
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers.architectures import write_hub_cache
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import RevisionNotFoundError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BartConfig,
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    ErnieConfig,
    FNetConfig,
    ModernBertConfig,
    RobertaConfig,
)
from transformers.trainer_utils import align_special_tokens

from app.common.errors import UserError
from app.data.loaders import Collator
from app.model.built_in import learn_tokenizer
from app.model.hub import resolve_commit
from app.model.load import align_with_trainer, is_pretrained, load_classifier, load_tokenizer, override_dropout
from app.settings import Settings

TEXTS = ["房间很干净，服务很好。", "早餐太差，再也不来。"] * 20
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
CONFIGS = {
    "bert": BertConfig(**SMALL),
    "roberta": RobertaConfig(**SMALL, max_position_embeddings=66, pad_token_id=1),
    "electra": ElectraConfig(**SMALL, embedding_size=32),
    "ernie": ErnieConfig(**SMALL),
    "modernbert": ModernBertConfig(**SMALL, pad_token_id=0, cls_token_id=2, sep_token_id=3),
    "bart": BartConfig(
        **{
            f"{part}_{name}": n
            for part in ("encoder", "decoder")
            for name, n in [("layers", 1), ("attention_heads", 2)]
        },
        **{"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 66},
    ),
    "distilbert": DistilBertConfig(dim=32, n_layers=1, n_heads=2, hidden_dim=32),
}


@pytest.fixture
def tokenizer():
    return learn_tokenizer(TEXTS, 8_000)


@pytest.fixture
def folder(tmp_path, tokenizer):
    """Write a model folder with config and tokenizer, and optionally weights."""

    def write(name: str = "bert", weights: bool = False, **changes):
        known = CONFIGS | {"fnet": FNetConfig(hidden_size=32, num_hidden_layers=1, intermediate_size=32)}
        config = known[name].__class__(**(known[name].to_diff_dict() | {"vocab_size": len(tokenizer)} | changes))
        path = tmp_path / name
        if weights:
            AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
        config.save_pretrained(path)
        tokenizer.save_pretrained(path)
        return str(path)

    return write


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("weights", [False, True])
def test_any_architecture_becomes_a_classifier_for_the_classes_of_the_data(folder, name, weights):
    settings = Settings(model=folder(name, weights), max_length=32)
    tokenizer = load_tokenizer(settings, TEXTS)
    loaded = load_classifier(settings, ["bad", "good", "mixed"], tokenizer)
    assert is_pretrained(settings.model) is weights
    assert loaded.model.config.id2label == {0: "bad", 1: "good", 2: "mixed"}
    assert loaded.model.accepts_loss_kwargs is False, "Trainer would inflate loss and gradients"
    batch = tokenizer(TEXTS[:4], padding=True, return_tensors="pt")
    output = loaded.model(**batch, labels=torch.tensor([0, 1, 2, 0]))
    assert output.logits.shape == (4, 3)
    assert output.loss.ndim == 0


def test_weights_come_from_the_folder_or_are_initialized_from_the_seed(folder):
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


def test_a_head_for_other_classes_is_initialized_from_the_seed(folder):
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


@pytest.mark.parametrize("weights", [False, True])
def test_special_tokens_are_taken_from_the_tokenizer_before_the_model_is_built(folder, tokenizer, weights):
    settings = Settings(model=folder("bert", weights, pad_token_id=7, bos_token_id=8, eos_token_id=9), max_length=32)
    tokenizer.bos_token, tokenizer.eos_token = "[CLS]", "[SEP]"
    model = load_classifier(settings, ["0", "1"], tokenizer).model
    assert model.bert.embeddings.word_embeddings.padding_idx == model.config.pad_token_id == tokenizer.pad_token_id
    assert (model.config.bos_token_id, model.config.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert model.config.use_cache is False


def test_special_tokens_that_the_tokenizer_lacks_are_kept(tokenizer):
    config = BertConfig(bos_token_id=8, eos_token_id=[9, 10])
    align_with_trainer(config, tokenizer)
    assert (config.bos_token_id, config.eos_token_id) == (8, [9, 10])
    tokenizer.eos_token = "[SEP]"
    align_with_trainer(config, tokenizer)
    assert config.eos_token_id == [tokenizer.eos_token_id, 9, 10]


@pytest.mark.parametrize("eos_token_id", [9, [9, 10], [3, 9], None])
def test_trainer_has_nothing_left_to_align(tokenizer, eos_token_id):
    tokenizer.bos_token, tokenizer.eos_token = "[CLS]", "[SEP]"
    config = BertConfig(pad_token_id=7, eos_token_id=eos_token_id)
    align_with_trainer(config, tokenizer)
    before = config.to_dict()
    align_special_tokens(SimpleNamespace(config=config, generation_config=None), tokenizer)
    assert config.to_dict() == before


def test_a_padding_token_outside_the_vocabulary_is_rejected(folder):
    path = folder("bert")
    config = BertConfig.from_pretrained(path)
    config.vocab_size, config.pad_token_id = 5, 4
    config.save_pretrained(path)
    tokenizer = load_tokenizer(Settings(model=path), TEXTS)
    tokenizer.add_special_tokens({"pad_token": "[NEW]"})
    tokenizer.save_pretrained(path)
    assert "Padding_idx must be within num_embeddings" in error_message(Settings(model=path, max_length=32))


def test_layerdrop_requires_the_search_for_unused_parameters(folder):
    path = folder("bert", layerdrop=0.1)
    assert "--ddp_find_unused_parameters" in error_message(Settings(model=path, max_length=32))
    settings = Settings(model=path, max_length=32, ddp_find_unused_parameters=True)
    load_classifier(settings, ["0", "1"], load_tokenizer(settings, TEXTS))
    for strategy in ("zero2", "zero3"):
        settings = Settings(model=path, max_length=32, ddp_find_unused_parameters=True, strategy=strategy)
        assert "use --strategy ddp or zero1" in error_message(settings)


@pytest.mark.parametrize(
    ("name", "configured", "accepted"),
    [
        ("bert", ["input_ids"], ["input_ids", "attention_mask"]),
        ("distilbert", ["input_ids", "token_type_ids", "attention_mask"], ["input_ids", "attention_mask"]),
        ("bert", ["input_ids", "token_type_ids"], ["input_ids", "token_type_ids", "attention_mask"]),
        ("fnet", ["input_ids", "attention_mask"], ["input_ids"]),
    ],
)
def test_the_tokenizer_returns_and_saves_the_inputs_that_the_model_accepts(
    folder, tmp_path, name, configured, accepted
):
    settings = Settings(model=folder(name), max_length=32)
    tokenizer = load_tokenizer(settings, TEXTS)
    tokenizer.model_input_names = configured
    model = load_classifier(settings, ["0", "1"], tokenizer).model
    rows = tokenizer(TEXTS[:2], return_token_type_ids=True, return_attention_mask=False)
    rows = [{"labels": 0} | {key: rows[key][i] for key in rows} for i in range(2)]
    batch = Collator(tokenizer)(rows)
    assert sorted(batch) == sorted([*accepted, "labels"])
    model(**batch).loss.backward()
    padded = Collator(tokenizer, pad_to_multiple_of=8)(rows)
    assert padded["input_ids"].shape[1] == -(-batch["input_ids"].shape[1] // 8) * 8
    tokenizer.save_pretrained(tmp_path / "saved")
    assert sorted(AutoTokenizer.from_pretrained(tmp_path / "saved").model_input_names) == sorted(accepted)


# ---- models on the Hub ----------------------------------------------------------------------------------------------


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """Create a cache of `someone/model`, with commit aaa… on its main branch and bbb… on another branch."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    write_hub_cache(tmp_path / "hub", "someone/model", main="a" * 40, branch="b" * 40)
    return tmp_path / "hub"


@pytest.fixture
def hub(hub_cache, monkeypatch):
    """Simulate a Hub that knows the names of the cache. tests/model/test_hub.py downloads from one."""
    refs = hub_cache / "models--someone--model" / "refs"

    def model_info(self, name, *, revision=None, timeout=None):
        if not (refs / (revision or "main")).exists():
            raise RevisionNotFoundError("none", response=Mock())

    monkeypatch.setattr("app.model.hub.HfApi.model_info", model_info)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # for the files
    return refs


def commit_of_weights(settings: Settings, commit: str) -> str:
    """Return the commit that the loaded weights come from."""
    tokenizer, name = load_tokenizer(settings, TEXTS, commit), "bert.embeddings.word_embeddings.weight"
    weights = load_classifier(settings, ["0", "1"], tokenizer, commit=commit).model.state_dict()[name]
    (source,) = (
        known
        for known in ("a" * 40, "b" * 40)
        for file in [hf_hub_download(settings.model, "model.safetensors", revision=known, local_files_only=True)]
        if torch.equal(load_file(file)[name], weights)
    )
    return source


@pytest.mark.parametrize(("revision", "commit"), [(None, "a" * 40), ("branch", "b" * 40)])
@pytest.mark.parametrize("online", [False, True])
def test_a_revision_is_resolved_to_a_commit_that_everything_is_loaded_from(request, online, revision, commit):
    request.getfixturevalue("hub" if online else "hub_cache")
    if not online:
        request.getfixturevalue("monkeypatch").setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    settings = Settings(model="someone/model", revision=revision, max_length=32)
    assert resolve_commit(settings) == commit
    assert commit_of_weights(settings, commit) == commit


def test_a_branch_that_moves_between_two_requests_has_no_effect(hub):
    settings = Settings(model="someone/model", max_length=32)
    commit = resolve_commit(settings)
    (hub / "main").write_text("b" * 40)
    assert resolve_commit(settings) != commit
    assert commit_of_weights(settings, commit) == commit


def test_an_invalid_revision_is_rejected(hub, folder):
    for settings, message in (
        (Settings(model="someone/model", revision="no-such"), "--revision no-such: someone/model has no such"),
        (Settings(model=folder("bert"), revision="main"), "is not a model on the Hub, so it has no revisions"),
        (Settings(revision="main"), "is not a model on the Hub, so it has no revisions"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            resolve_commit(settings)
        assert len(str(caught.value).splitlines()) == 1


def test_layerdrop_and_switches_are_not_overridden_as_dropout():
    config = BertConfig()
    config.encoder_layerdrop, config.use_dropout_anywhere = 0.2, True
    override_dropout(config, 0.3)
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob, config.classifier_dropout) == (0.3,) * 3
    assert (config.encoder_layerdrop, config.use_dropout_anywhere) == (0.2, True)


def test_a_maximum_length_beyond_the_positions_is_rejected(folder):
    # RoBERTa's positions start after the padding id, which is the tokenizer's, 0, not the config's, 1.
    assert "accepts at most 65" in error_message(Settings(model=folder("roberta"), max_length=66))


def error_message(settings: Settings) -> str:
    """Return the one-line message of the UserError that loading raises."""
    with pytest.raises(UserError) as caught:
        load_classifier(settings, ["0", "1"], load_tokenizer(settings, TEXTS))
    assert len(str(caught.value).splitlines()) == 1
    assert settings.model in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    ("name", "attention", "message"),
    [
        ("fnet", "sdpa", r"FNet\w+ does not support .* yet$"),
        pytest.param(
            *("bert", "flash_attention_2", "FlashAttention2 .*cannot be used"),
            marks=pytest.mark.skipif(find_spec("flash_attn") is not None, reason="its package is installed"),
        ),
    ],
)
def test_an_attention_implementation_that_cannot_be_used_is_named(folder, weights, name, attention, message):
    settings = Settings(model=folder(name, weights), attn_implementation=attention)
    with pytest.raises(UserError, match=f"^--attn_implementation {attention}: {message}"):
        load_classifier(settings, ["0", "1"], load_tokenizer(settings, TEXTS))


def test_anything_that_is_not_a_model_is_rejected(tmp_path, folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "no such folder" in error_message(Settings(model=str(tmp_path / "none")))
    (tmp_path / "empty").mkdir()
    assert "config.json" in error_message(Settings(model=str(tmp_path / "empty")))
    (tmp_path / "file.txt").touch()
    assert "is not a model folder" in error_message(Settings(model=str(tmp_path / "file.txt")))
    assert "local cache" in error_message(Settings(model="nobody/no-such-model"))
    error_message(Settings(model="no such name!"))
    broken = folder("bert")
    (tmp_path / "bert" / "config.json").write_text("{")
    error_message(Settings(model=broken))
    shutil.copy(tmp_path / "bert" / "tokenizer.json", tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "no-such-type"}')
    error_message(Settings(model=str(tmp_path / "empty")))


def test_damaged_weights_are_reported(tmp_path, folder):
    path = folder("bert", weights=True)
    weights = tmp_path / "bert" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    error_message(Settings(model=path, max_length=32))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_weights_with_the_names_of_a_wrapper_are_rejected_instead_of_training_random_ones(folder, tmp_path, prefix):
    path, file = folder("bert", weights=True), tmp_path / "bert" / "model.safetensors"
    weights = {prefix + name: weight for name, weight in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    assert "none of its weights has the name and shape" in error_message(Settings(model=path, max_length=32))


DEEP = "[" * 100_000
EMPTY_INDEX = '{"metadata": {}, "weight_map": {}}'
ONE_SHARD = '{"metadata": {}, "weight_map": {"bert.pooler.dense.weight": "shard.bin"}}'


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("pytorch_model.bin", b"garbage", "pytorch_model.bin .* is damaged"),
        ("pytorch_model.bin", b"", "pytorch_model.bin .* is damaged"),
        (
            "pytorch_model.bin",
            pickle.dumps(error_message),
            "pytorch_model.bin .* is damaged, or holds more than weights",
        ),
        ("pytorch_model.bin.index.json", EMPTY_INDEX, "its model cannot be loaded"),
        ("pytorch_model.bin.index.json", ONE_SHARD, "pytorch_model.bin .* is damaged"),
        ("model.safetensors.index.json", EMPTY_INDEX, "its model cannot be loaded"),
        ("model.safetensors.index.json", "[]", "its model cannot be loaded"),
        ("model.safetensors", b"garbage", "its model cannot be loaded"),
        ("tokenizer.json", "[]", "its tokenizer cannot be loaded"),
        ("tokenizer.json", DEEP, "its tokenizer cannot be loaded"),
        ("tokenizer_config.json", DEEP, "its tokenizer cannot be loaded"),
        ("config.json", "3", "cannot be loaded"),
        ("config.json", DEEP, "cannot be loaded"),
        ("config.json", '{"model_type": "bert", "num_attention_heads": 0}', "by zero"),
        ("config.json", '{"model_type": "bert", "intermediate_size": -1}', "negative dimension"),
    ],
)
def test_a_damaged_file_of_a_model_is_one_line(tmp_path, folder, name, content, problem):
    path = folder("bert")
    (tmp_path / "bert" / "shard.bin").write_bytes(b"garbage")
    (tmp_path / "bert" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    message = error_message(Settings(model=path, max_length=32))
    assert re.search(problem, message)
    assert "weights_only" not in message, "it would run the code in the file"


def test_code_of_a_model_is_not_run_without_permission(folder, tmp_path):
    path = folder("bert")
    config = tmp_path / "bert" / "config.json"
    auto = '"auto_map": {"AutoConfig": "evil.Config", "AutoModelForSequenceClassification": "evil.Model"}, '
    config.write_text(
        config.read_text().replace('"model_type": "bert"', '"model_type": "evil"').replace("{", "{" + auto, 1)
    )
    (tmp_path / "bert" / "evil.py").write_text("raise SystemExit('code of the model was run')")
    error_message(Settings(model=path))


@pytest.mark.parametrize("spread", [6e38, 1.0])
def test_an_infinite_loss_makes_the_gradient_norm_nonfinite_and_a_finite_loss_is_unchanged(folder, tokenizer, spread):
    model = load_classifier(Settings(model=folder(), dropout=0.0), ["bad", "good"], tokenizer).model
    with torch.no_grad():
        model.classifier.bias.copy_(torch.tensor([spread / 2, -spread / 2]))
    outputs = model(**tokenizer("差", return_tensors="pt"), labels=torch.tensor([1]))
    assert outputs.loss.equal(torch.nn.functional.cross_entropy(outputs.logits, torch.tensor([1]))) == (spread == 1.0)
    outputs.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert torch.isfinite(norm) == (spread == 1.0)
