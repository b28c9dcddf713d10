"""The files of a finished run: the model with its card, predictions.csv and metrics.json. Rank 0 writes them."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
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
from ..common.files import commit, write_json
from ..common.formats import render_template
from ..common.paths import PACKAGE
from ..metrics.score import Scores
from ..runs.hashes import DIGITS, hash_run
from ..runs.schema import LATEST, METRICS, MODEL_CARD, MODEL_FOLDER, PREDICTIONS, RUNS, STEPS
from ..setting_groups import BUILT_IN
from ..strategies.base import Tensors
from ..training.console import block
from ..training.prepare import Preparation
from .predictions import write_predictions
from .run_folder import split_content

MODEL_STAGING = f".{MODEL_FOLDER}.tmp"
TASK = "text-classification"


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
    write_predictions(run.folder / PREDICTIONS, run.data.table, run.data.split.test, logits=logits)
    try:
        staging = stage_model(run.folder, run.model, state, tokenizer=run.data.tokenizer)
        metrics = metrics_content(run.folder, scores, peak_memory) | {"hash": hash_run(run.folder, staging)}
        (staging / MODEL_CARD).write_text(model_card(run, metrics), encoding="utf-8")
        commit(staging, run.folder / MODEL_FOLDER)
    except BaseException:
        shutil.rmtree(run.folder / MODEL_STAGING, ignore_errors=True)
        raise
    write_json(run.folder / METRICS.name, metrics)
    return metrics


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


def describe_result(run: Preparation, metrics: Mapping[str, Any]) -> str:
    """Return the block that a run prints at its end: its results, its files, and the next steps."""
    n, accuracy, model = metrics["n_test"], metrics["accuracy"], str(run.folder / MODEL_FOLDER)
    seconds, rate = metrics["train_seconds"], metrics["train_examples_per_second"]
    other_path = RUNS / ("trainer_run" if run.path_name == "ddp_loop" else "ddp_loop") / LATEST
    other_run = shlex.quote(str(other_path)) if other_path.exists() else "OTHER_RUN"
    facts = {
        "test accuracy": f"{accuracy:.4f} ({round(accuracy * n)} of {n} reviews), F1 {metrics['f1']:.4f}",
        "training took": f"{seconds:.1f} s, {rate:.0f} reviews per second",
        "hash": f"{metrics['hash'][:DIGITS]}: weights, losses, gradient norms, evaluations and predictions",
        "model": f"{model}/",
        "predictions": run.folder / PREDICTIONS,
        "use": f'transformers.pipeline("text-classification", model={model!r}, truncation=True)',
        "compare": f"python -m {PACKAGE}.compare {shlex.quote(str(run.folder))} {other_run}",
    }
    return block(facts)


def stage_model(folder: Path, model: PreTrainedModel, state: Tensors, *, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write weights, config and tokenizer into a staging directory, so that `pipeline` can load them.

    Args:
        state: the complete state dict.

    Raises:
        OSError: a file cannot be written, or the run's folder is gone.
    """
    staging = folder / MODEL_STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()  # save_pretrained would also create a run folder that is gone
    try:
        model.save_pretrained(staging, state_dict=share_tied_tensors(model, state))
        tokenizer.save_pretrained(staging)
    except (OSError, SafetensorError) as problem:
        raise OSError(f"{folder / MODEL_FOLDER} could not be written: {problem}") from None
    return staging


def share_tied_tensors(model: torch.nn.Module, state: Tensors) -> Tensors:
    """Let tied parameters share a tensor in the state dict too, as they do in `model.state_dict()`.

    `save_pretrained` recognizes tied weights by their shared memory, and omits all but one of them. In a state dict
    that was gathered from shards, each name may have a copy.
    """
    own = model.state_dict(keep_vars=True)  # the parameters themselves; this gathers nothing
    first_names: dict[int, str] = {}
    for name, parameter in own.items():
        first_names.setdefault(id(parameter), name)
    return {name: state[first_names[id(own[name])]] if name in own else tensor for name, tensor in state.items()}


def model_card(run: Preparation, metrics: Mapping[str, Any]) -> str:
    """Return the text of the model card: YAML front matter for the Hub, then Markdown (after SetFit's model card)."""
    body = render_template(
        "model_card.md.j2",
        base=_base_model(run),
        path_name=run.path_name,
        settings=run.settings,
        model_commit=run.identity["model_commit"],
        split=split_content(run),
        class_names=run.data.table.class_names,
        metrics=metrics,
    )
    return f"---\n{_metadata(run, metrics).to_yaml()}\n---\n\n{body}\n"


def _metadata(run: Preparation, metrics: Mapping[str, Any]) -> ModelCardData:
    """Return the front matter, without unknown facts such as the language of a user's reviews."""
    dataset, base = escape_control_characters(run.data.table.path.stem), _base_model(run)
    results = [
        EvalResult(TASK, "csv", dataset, metric_type=name, metric_value=metrics[name], dataset_split="test")
        for name in ("accuracy", "f1")
    ]
    return ModelCardData(
        base_model=None if Path(run.settings.model).is_dir() else base,
        license="unknown",
        library_name="transformers",
        pipeline_tag=TASK,
        metrics=["accuracy", "f1"],
        model_name=f"{base or 'Text classifier'} trained on {dataset}",
        eval_results=results,
    )


def _base_model(run: Preparation) -> str | None:
    """Return the name of the model that was fine-tuned, or of its folder; None for a built-in model."""
    model = run.settings.model
    if model in BUILT_IN:
        return None
    return escape_control_characters(Path(model).resolve().name if Path(model).is_dir() else model)
