"""The files of a finished run: all weights are in its model, and metrics.json comes last."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.architectures import write_model
from record.conftest import SCORES, do_steps, files_up_to, finish
from scipy.special import softmax
from transformers import AutoConfig, AutoModelForSequenceClassification, pipeline

from app.record import results, steps
from app.record.results import predictions_as_csv
from app.runs.hashes import hash_run
from app.runs.reader import read_run

# Old runs must remain readable, and other programs read these files: no file and no key may change its name.
KEYS = {
    "settings.json": "path command date world_size csv seed git_commit devices launchers versions kernels model_commit "
    "model_config model_code_sha256 tokens_sha256 logical_ranks strategy wrapper deepspeed_config threads cache_dir "
    "text_column label_column test_size validation_size",
    "split.json": "fingerprint n_test classes csv csv_sha256 rows_read rows_dropped seed test_size validation_size "
    "n_train n_validation duplicates csv_escape",
    "steps.jsonl": "step epoch loss learning_rate examples tokens padded_tokens seconds grad_norm",
    "evaluations.jsonl": "step epoch rows accuracy loss n f1",
    "metrics.json": "accuracy f1 loss n_test train_seconds train_examples_per_second peak_memory_bytes precision "
    "recall positive_class confusion_matrix train_tokens_per_second padding_fraction skipped_steps hash",
}


@pytest.mark.parametrize("architecture", ["bert", "bart", "gpt2"])  # BART's embeddings are tied
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_weights_that_were_not_trained_are_written_bitwise_as_they_were_loaded(
    started, tmp_path, architecture, strategy
):
    source = write_model(tmp_path / "source", architecture)
    config = AutoConfig.from_pretrained(source, num_labels=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(source)
    record = started(model=str(source), strategy=strategy, weight_decay=0)
    do_steps(record)
    finish(record)
    written = record.folder / "model"
    assert (written / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert pipeline("text-classification", str(written))("好")


def test_a_finished_run_has_the_files_and_keys_of_the_schema(started, capsys, monkeypatch):
    record, done = started(save_strategy="no", max_steps=2), []
    do_steps(record, 2)
    record.after_evaluation(2, "test", SCORES)
    flush, replace = steps.flush, os.replace
    monkeypatch.setattr(steps, "flush", lambda path: (done.append(path.name), flush(path)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(Path(b).name), replace(a, b)))
    finish(record)
    # metrics.json marks the run as finished. tests/common/test_files.py checks that what gets a name is flushed.
    assert done == ["steps.jsonl", "evaluations.jsonl", "predictions.csv", "model", "metrics.json"]
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
    data = started().run.data
    table, rows = data.table, data.split.test
    logits = np.random.default_rng(0).normal(size=(len(rows), 2))
    texts = list(predictions_as_csv(table, rows, logits=logits))
    assert len(texts) == math.ceil(len(logits) / at_once)
    columns = {"row": table.rows[rows], "label": table.labels[rows], "predicted": logits.argmax(axis=1)}
    columns |= dict(zip(["probability_0", "probability_1"], softmax(logits, axis=1).T, strict=True))
    expected = pd.DataFrame(columns | {"review": table.texts_of(rows).to_numpy()})
    pd.testing.assert_frame_equal(pd.read_csv(io.StringIO("".join(texts))), expected, rtol=1e-12, check_dtype=False)


def test_a_model_that_can_not_be_written_is_a_one_line_error_and_leaves_nothing(started):
    record = started()
    do_steps(record)
    with files_up_to(20_000), pytest.raises(OSError, match=r"model could not be written: .*File too large"):
        finish(record)
    assert not (record.folder / ".model.tmp").exists()
