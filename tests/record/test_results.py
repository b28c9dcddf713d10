"""The files of a finished run: the model is bitwise what `save_pretrained` writes, and metrics.json comes last."""

from __future__ import annotations

import io
import json
import math
import os
from copy import deepcopy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.architectures import write_model
from helpers.worlds import batch_plan
from record.run_records import SCORES, add_steps, finish
from safetensors import SafetensorError
from scipy.special import softmax
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from app.model.load import load_classifier, load_tokenizer
from app.record import results, steps
from app.record.results import predictions_as_csv, stage_model
from app.record.run_record import RunRecord
from app.runs.hashes import hash_run
from app.runs.reader import read_run
from app.settings import Settings
from app.training.build import select_strategy

# Old runs must remain readable, and other programs read these files: no file and no key may change its name.
KEYS = {
    "settings.json": "path world_size csv seed git_commit devices launchers versions kernels model_commit model_config "
    "model_code_sha256 tokens_sha256 logical_ranks strategy wrapper deepspeed_config threads cache_dir text_column "
    "label_column test_size validation_size",
    "split.json": "fingerprint n_test classes csv csv_sha256 rows_read rows_dropped seed test_size validation_size "
    "n_train n_validation duplicates csv_escape",
    "steps.jsonl": "step epoch loss learning_rate examples tokens padded_tokens seconds grad_norm",
    "evaluations.jsonl": "step epoch rows accuracy loss n f1",
    "metrics.json": "accuracy f1 loss n_test train_seconds train_examples_per_second peak_memory_bytes precision "
    "recall confusion_matrix train_tokens_per_second padding_fraction skipped_steps hash",
}


@pytest.mark.parametrize("architecture", ["bert", "bart", "gpt2"])  # BART's embeddings are tied
@pytest.mark.parametrize("strategy_name", ["ddp", "zero3"])
def test_the_model_is_bitwise_what_save_pretrained_writes(world, tmp_path, architecture, strategy_name):
    source = write_model(tmp_path / "source", architecture)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(source))
    model.save_pretrained(tmp_path / "expected")
    strategy = select_strategy(Settings(strategy=strategy_name), batch_plan(), world)
    strategy.wrap(model)
    state = deepcopy(strategy.gather_model_state(model))
    with torch.no_grad():  # the model's own tensors, which may be shards, are not what is written
        for parameter in model.parameters():
            parameter.zero_()
    stage_model(tmp_path / "written", model, state, tokenizer=AutoTokenizer.from_pretrained(source))
    for file in (tmp_path / "expected").iterdir():
        assert (tmp_path / "written" / file.name).read_bytes() == file.read_bytes(), file.name
    assert pipeline("text-classification", str(tmp_path / "written"))("好")


def finish_with_model(record: RunRecord) -> None:
    data = record.run.data
    data.tokenizer = load_tokenizer(record.settings, data.table.texts)
    finish(record, model=load_classifier(record.settings, data.table.class_names, data.tokenizer).model)


def test_a_finished_run_has_the_files_and_keys_of_the_schema(started, capsys):
    record = started(max_length=16, save_strategy="no", max_steps=2)
    add_steps(record, 1, 2)
    record.after_evaluation(2, "test", SCORES)
    finish_with_model(record)
    assert {path.name for path in record.folder.iterdir()} == {*KEYS, "predictions.csv", "model", ".lock"}
    for file, keys in KEYS.items():
        text = (record.folder / file).read_text("utf-8")
        content = json.loads(text.splitlines()[0] if file.endswith("l") else text)
        assert content.keys() == {*keys.split(), *(record.settings.as_dict() if file == "settings.json" else ())}, file
    run = read_run(record.folder)
    assert run.metrics["accuracy"] == 1.0
    assert run.metrics["hash"] == hash_run(record.folder)
    assert run.metrics["hash"] in (record.folder / "model" / "README.md").read_text("utf-8")
    assert run.metrics["train_seconds"] == sum(step["seconds"] for step in run.steps)
    assert (run.metrics["padding_fraction"], run.metrics["skipped_steps"]) == (0.0, 0)
    assert run.metrics["hash"][:16] in capsys.readouterr().out


@pytest.mark.parametrize("at_once", [results.CHUNK, 5])
def test_predictions_are_those_of_a_softmax_however_many_are_in_memory(started, monkeypatch, at_once):
    monkeypatch.setattr(results, "CHUNK", at_once)
    data = started(max_length=16).run.data
    logits = np.random.default_rng(0).normal(size=(len(data.split.test), 2))
    texts = list(predictions_as_csv(data.table, data.split.test, logits=logits))
    assert len(texts) == math.ceil(len(logits) / at_once)
    frame = pd.read_csv(io.StringIO("".join(texts)))
    assert frame.row.tolist() == data.table.rows[data.split.test].tolist()
    assert frame.review.tolist() == data.table.texts_of(data.split.test).tolist()
    assert frame.label.tolist() == data.table.labels[data.split.test].tolist()
    assert frame.predicted.tolist() == logits.argmax(axis=1).tolist()
    assert np.allclose(frame[["probability_0", "probability_1"]], softmax(logits, axis=1), rtol=1e-12)


def test_everything_else_is_on_disk_before_metrics_json_marks_the_run_finished(started, monkeypatch):
    """tests/common/test_files.py checks that what gets a name has been flushed to disk."""
    record, done = started(max_length=16), []
    add_steps(record, 1)
    flush, replace = steps.flush, os.replace
    monkeypatch.setattr(steps, "flush", lambda path: (done.append(path.name), flush(path)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(Path(b).name), replace(a, b)))
    finish_with_model(record)
    assert done == ["steps.jsonl", "predictions.csv", "model", "metrics.json"]


def test_a_model_that_can_not_be_written_is_a_one_line_error_and_leaves_nothing(started):
    class Model(nn.Linear):
        def save_pretrained(self, folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
            (folder / "half").touch()
            raise SafetensorError("I/O error: No space left on device")

    record = started()
    add_steps(record, 1)
    with pytest.raises(OSError, match="model could not be written: I/O error: No space left"):
        finish(record, model=Model(2, 2))
    assert not (record.folder / ".model.tmp").exists()
