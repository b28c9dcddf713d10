"""The files of a finished run: the model is bitwise what `save_pretrained` writes, and metrics.json comes last."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.run_records import add_steps, begin, finish
from helpers.worlds import batch_plan
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedModel,
)

from app.common import files
from app.model.built_in import learn_tokenizer
from app.model.load import load_classifier, load_tokenizer
from app.record import results, steps
from app.record.results import predictions_as_csv, stage_model
from app.runs.hashes import hash_run
from app.runs.reader import read_run
from app.runs.schema import (
    EVALUATIONS,
    LOCK,
    METRICS,
    MODEL,
    MODEL_CARD,
    MODEL_FOLDER,
    PREDICTIONS,
    SETTINGS,
    SPLIT,
    STEPS,
)
from app.settings import Settings
from app.training.build import select_strategy

# Old runs must remain readable, and other programs read these files: no key may change its name.
KEYS = {
    SETTINGS: "path world_size csv seed git_commit devices launchers versions kernels model_commit model_config "
    "model_code_sha256 tokens_sha256 logical_ranks strategy wrapper deepspeed_config threads cache_dir text_column "
    "label_column test_size validation_size",
    SPLIT: "fingerprint n_test classes csv csv_sha256 rows_read rows_dropped seed test_size validation_size n_train "
    "n_validation duplicates csv_escape",
    STEPS: "step epoch loss learning_rate examples tokens padded_tokens seconds grad_norm",
    EVALUATIONS: "step epoch rows accuracy loss n f1",
    METRICS: "accuracy f1 loss n_test train_seconds train_examples_per_second peak_memory_bytes precision recall "
    "confusion_matrix train_tokens_per_second padding_fraction skipped_steps hash",
}
SIZES = {"vocab_size": 60, "num_labels": 3}
LAYERS = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}


def bert() -> PreTrainedModel:
    layers = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(**SIZES, **layers))


def bart() -> PreTrainedModel:
    config = BartConfig(**SIZES, **LAYERS, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16)
    model = BartForSequenceClassification(config)
    assert model.model.shared.weight is model.model.encoder.embed_tokens.weight, "this test needs tied weights"
    return model


def gpt2() -> PreTrainedModel:
    return GPT2ForSequenceClassification(GPT2Config(**SIZES, n_embd=16, n_layer=1, n_head=2))


@pytest.mark.parametrize("build", [bert, bart, gpt2])
@pytest.mark.parametrize("strategy_name", ["ddp", "zero3"])
def test_the_model_is_bitwise_what_save_pretrained_writes(world, tmp_path, build, strategy_name):
    model, tokenizer = build(), learn_tokenizer(["好，差。"] * 9, 8_000)
    model.save_pretrained(tmp_path / "expected")
    state_dict = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    strategy = select_strategy(Settings(strategy=strategy_name), batch_plan(), world)
    strategy.wrap(model)
    written = tmp_path / "written"
    stage_model(written, model, strategy.gather_model_state(model), tokenizer=tokenizer)
    for file in (tmp_path / "expected").iterdir():
        assert (written / file.name).read_bytes() == file.read_bytes(), file.name
    loaded = type(model).from_pretrained(written)
    for (name, a), b in zip(state_dict.items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_the_state_that_the_strategy_has_gathered_is_written(tmp_path):
    """Not the model's own tensors, which may be shards."""
    model, tokenizer = bert(), learn_tokenizer(["好，差。"] * 9, 8_000)
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    stage_model(tmp_path / "written", model, dict(state), tokenizer=tokenizer)
    written = load_file(tmp_path / "written" / MODEL)
    assert all(torch.equal(written[name], state[name]) for name in written)


def finish_with_model(record) -> None:
    data = record.run.data
    data.tokenizer = load_tokenizer(record.settings, data.table.texts)
    finish(record, model=load_classifier(record.settings, data.table.class_names, data.tokenizer).model)


def test_a_finished_run_has_the_files_and_keys_of_the_schema(new_record, capsys):
    record, plan = new_record(max_length=16, save_strategy="no", max_steps=2)
    begin(record, plan)
    add_steps(record, 1, 2)
    record.after_evaluation(2, "test", {"n": 12, "accuracy": 0.5, "f1": 0.5, "loss": 0.7})
    finish_with_model(record)
    names = {path.name for path in record.folder.iterdir()}
    assert names == {
        *(file.name for file in (SETTINGS, SPLIT, STEPS, EVALUATIONS, METRICS)),
        *(PREDICTIONS, MODEL_FOLDER, LOCK),
    }

    def keys_of(file: Path) -> set[str]:
        text = (record.folder / file).read_text("utf-8")
        objects = [json.loads(line) for line in text.splitlines()] if file.name.endswith("l") else [json.loads(text)]
        return set(objects[0])

    for file, keys in KEYS.items():
        assert keys_of(file) == {*keys.split(), *(record.settings.as_dict() if file == SETTINGS else ())}, file
    run = read_run(record.folder)
    assert run.metrics["accuracy"] == 1.0
    assert run.metrics["hash"] == hash_run(record.folder)
    assert run.metrics["hash"] in (record.folder / MODEL_FOLDER / MODEL_CARD).read_text("utf-8")
    assert run.metrics["train_seconds"] == sum(step["seconds"] for step in run.steps)
    assert (run.metrics["padding_fraction"], run.metrics["skipped_steps"]) == (0.0, 0)
    assert run.metrics["hash"][:16] in capsys.readouterr().out


def test_predictions_are_written_in_chunks(new_record, monkeypatch):
    data = new_record(max_length=16)[0].run.data
    logits = np.random.default_rng(0).normal(size=(len(data.split.test), 2))
    at_once = list(predictions_as_csv(data.table, data.split.test, logits=logits))
    monkeypatch.setattr(results, "CHUNK", 5)
    in_chunks = list(predictions_as_csv(data.table, data.split.test, logits=logits))
    assert len(in_chunks) > len(at_once) == 1
    assert "".join(in_chunks) == at_once[0]
    assert at_once[0].count("\n") == 1 + len(data.split.test) > 6


def test_everything_else_is_on_disk_before_metrics_json_marks_the_run_finished(new_record, monkeypatch):
    record, plan = new_record(max_length=16)
    begin(record, plan)
    add_steps(record, 1)
    done: list[tuple[str, str]] = []
    flush, replace = files.flush, os.replace
    for module in (files, steps):
        monkeypatch.setattr(module, "flush", lambda path: (done.append(("flush", path.name)), flush(path)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(("rename", Path(b).name)), replace(a, b)))
    finish_with_model(record)
    assert [name for what, name in done if what == "rename"] == [PREDICTIONS, MODEL_FOLDER, METRICS.name]
    for name, contents in ((MODEL_FOLDER, {MODEL, "config.json"}), (PREDICTIONS, set())):
        position = done.index(("rename", name))
        assert contents <= {flushed for what, flushed in done[:position] if what == "flush"}
        assert done[position + 1] == ("flush", "run")
    assert ("flush", STEPS.name) in done[: done.index(("rename", MODEL_FOLDER))]
    assert done[-1] == ("flush", "run")


def test_a_model_that_can_not_be_written_is_a_one_line_error_and_leaves_nothing(new_record):
    class Model(nn.Linear):
        def save_pretrained(self, folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
            (folder / "half").touch()
            raise SafetensorError("I/O error: No space left on device")

    record, plan = new_record()
    begin(record, plan)
    add_steps(record, 1)
    with pytest.raises(OSError, match="model could not be written: I/O error: No space left"):
        finish(record, model=Model(2, 2))
    assert not (record.folder / ".model.tmp").exists()


def test_a_model_whose_results_can_not_be_hashed_leaves_nothing(new_record):
    record, plan = new_record(max_length=16)
    begin(record, plan)
    add_steps(record, 1)
    (record.folder / STEPS.name).unlink()
    with pytest.raises(OSError, match=STEPS.name):
        finish_with_model(record)
    assert not [path.name for path in record.folder.iterdir() if "model" in path.name]


def test_a_run_folder_that_is_gone_is_not_created_for_the_results(new_record):
    record, plan = new_record()
    begin(record, plan)
    add_steps(record, 1)
    record.folder.rename(record.folder.with_name("elsewhere"))
    with pytest.raises(FileNotFoundError):
        finish(record)
    assert not record.folder.exists()
