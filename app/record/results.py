"""The files of a finished run: the model with its card, predictions.csv and metrics.json. Rank 0 writes them."""

from __future__ import annotations

import csv
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from huggingface_hub import EvalResult, ModelCardData
from numpy.typing import NDArray
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.errors import escape_control_characters
from ..common.files import commit, write_json, write_text
from ..common.formats import render_template
from ..common.paths import PACKAGE
from ..data.reviews import Indices, ReviewTable
from ..metrics.score import Scores, name_f1
from ..runs.csv_escape import escape
from ..runs.hashes import DIGITS, hash_run
from ..runs.schema import LATEST, METRICS, MODEL_CARD, MODEL_FOLDER, PREDICTIONS, RUNS, STEPS, prediction_columns
from ..setting_groups import BUILT_IN
from ..strategies.base import Tensors
from ..training.console import block
from ..training.prepare import Preparation
from .run_folder import split_content

TASK = "text-classification"
CHUNK = 10_000  # rows of predictions.csv that are in memory at once


def write_results(
    run: Preparation, state: Tensors, *, logits: NDArray[np.floating[Any]], scores: Scores, peak_memory: Sequence[int]
) -> dict[str, Any]:
    """Write predictions.csv, the model and, last, metrics.json.

    Args:
        state: the model's complete state dict; the model itself may be sharded.
        logits: float (n_test, classes), of the test rows in file order.
        peak_memory: of each rank, in bytes.

    Returns:
        The content of metrics.json. It includes a hash of the logs, which must be complete.

    Raises:
        OSError: a file cannot be written, or the folder is gone.
    """
    write_text(run.folder / PREDICTIONS, predictions_as_csv(run.data.table, run.data.split.test, logits=logits))
    staging = run.folder / f".{MODEL_FOLDER}.tmp"
    run.data.tokenizer.model_max_length = run.settings.max_length  # where `pipeline(…, truncation=True)` cuts
    try:
        stage_model(staging, run.model, state, tokenizer=run.data.tokenizer)
        metrics = metrics_content(run.folder, scores, peak_memory) | {"hash": hash_run(run.folder, staging)}
        (staging / MODEL_CARD).write_text(model_card(run, metrics), encoding="utf-8")
        commit(staging, run.folder / MODEL_FOLDER)
    except (OSError, SafetensorError) as problem:
        raise OSError(f"{run.folder / MODEL_FOLDER} could not be written: {problem}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    write_json(run.folder / METRICS.name, metrics)
    return metrics


def predictions_as_csv(
    table: ReviewTable, part: Indices, *, logits: NDArray[np.floating[Any]], has_labels: bool = True
) -> Iterator[str]:
    """Yield the text of predictions.csv in parts: a header, and a line per row in this order.

    Args:
        part: positions in the table, int64 (n,).
        logits: float (n, classes).
        has_labels: whether there is a column of labels; a row without one has an empty cell.
    """
    header = list(map(escape, prediction_columns(table.class_names, has_labels)))
    names = np.array([*map(escape, table.class_names), ""])  # the label of a row without one is -1
    for start in range(0, len(part), CHUNK):
        rows, its_logits = part[start : start + CHUNK], logits[start : start + CHUNK]
        labels = [names[table.labels[rows]]] if has_labels else []
        probabilities = torch.from_numpy(its_logits).double().softmax(dim=1).numpy()
        texts = table.texts_of(rows).map(escape).to_numpy()
        columns = [table.rows[rows], *labels, names[its_logits.argmax(axis=1)], *probabilities.T, texts]
        yield pd.DataFrame(dict(enumerate(columns))).to_csv(
            header=header if start == 0 else False, index=False, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n"
        )


def metrics_content(folder: Path, scores: Scores, peak_memory: Sequence[int]) -> dict[str, Any]:
    """Return the content of metrics.json, except for the hash: the scores, and totals of the lines of steps.jsonl."""
    # A step has no gradient norm if it was skipped because of an overflow in fp16.
    steps = pd.read_json(folder / STEPS.name, lines=True, precise_float=True, dtype={"grad_norm": float})
    examples, tokens, padded_tokens, seconds = steps[["examples", "tokens", "padded_tokens", "seconds"]].sum().tolist()
    metrics = asdict(scores)
    metrics["n_test"] = metrics.pop("n")
    return metrics | {
        "train_seconds": seconds,
        "train_examples_per_second": examples / seconds,
        "train_tokens_per_second": tokens / seconds,
        "padding_fraction": 1 - tokens / padded_tokens,
        "skipped_steps": int(steps["grad_norm"].isna().sum()),
        "peak_memory_bytes": list(peak_memory),
    }


def describe_result(run: Preparation, scores: Scores, metrics: Mapping[str, Any]) -> str:
    """Return the block that a run prints at its end: its results, its files, and the next steps."""
    model, seconds = str(run.folder / MODEL_FOLDER), metrics["train_seconds"]
    other = RUNS / ("trainer_run" if run.path_name == "ddp_loop" else "ddp_loop") / LATEST
    compare = f"python -m {PACKAGE}.compare {shlex.quote(str(run.folder))} {other}"
    facts = {
        "test accuracy": scores.describe(run.data.table.class_names),
        "training took": f"{seconds:.1f} s, {metrics['train_examples_per_second']:.0f} rows per second",
        "hash": f"{metrics['hash'][:DIGITS]}: weights, losses, gradient norms, evaluations and predictions",
        "predictions": run.folder / PREDICTIONS,
        "use": f'transformers.pipeline("text-classification", model={model!r}, truncation=True)',
        "compare": compare if other.exists() else None,
    }
    return block(facts)


def stage_model(staging: Path, model: PreTrainedModel, state: Tensors, *, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write weights, config and tokenizer into a staging directory, so that `pipeline` can load them.

    Args:
        state: the complete state dict, in which tied parameters share a tensor.

    Raises:
        OSError, SafetensorError: a file cannot be written, or the run's folder is gone.
    """
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()  # save_pretrained would also create a run folder that is gone
    model.save_pretrained(staging, state_dict=state)
    tokenizer.save_pretrained(staging)


def model_card(run: Preparation, metrics: Mapping[str, Any]) -> str:
    """Return the text of the model card: YAML front matter for the Hub, then Markdown (after SetFit's model card)."""
    model, is_folder = run.settings.model, Path(run.settings.model).is_dir()
    # The name of the model that was fine-tuned, or of its folder; the names of files and folders are untrusted.
    base = None if model in BUILT_IN else escape_control_characters(Path(model).resolve().name if is_folder else model)
    dataset = escape_control_characters(run.data.table.path.stem)
    f1 = escape_control_characters(name_f1(metrics["positive_class"], run.data.table.class_names))
    results = [
        EvalResult(TASK, "csv", dataset, name, metrics[name], metric_name=shown, dataset_split="test")
        for name, shown in (("accuracy", "accuracy"), ("f1", f1))
    ]
    metadata = ModelCardData(  # without unknown facts such as the language of a user's reviews
        base_model=None if is_folder else base,
        license="unknown",
        library_name="transformers",
        pipeline_tag=TASK,
        metrics=["accuracy", "f1"],
        model_name=f"{base or 'Text classifier'} trained on {dataset}",
        eval_results=results,
    )
    body = render_template("model_card.md.j2", run=run, base=base, split=split_content(run), metrics=metrics, f1=f1)
    return f"---\n{metadata.to_yaml()}\n---\n\n{body}\n"
