"""The files of a finished run: the model with its card, predictions.csv and metrics.json. Rank 0 writes them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from numpy.typing import NDArray
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.errors import escape_control_characters
from ..common.files import commit, write_json
from ..common.formats import render_template
from ..common.paths import DOWNLOADED_CSV, SAMPLE_CSV
from ..metrics.score import Scores
from ..runs.hashes import hash_run
from ..runs.schema import METRICS, MODEL_CARD, MODEL_FOLDER, PREDICTIONS, SETTINGS
from ..setting_groups import BUILT_IN
from ..strategies.base import Tensors
from .predictions import write_predictions
from .run_folder import RunInfo, split_content
from .steps import Totals

MODEL_STAGING = f".{MODEL_FOLDER}.tmp"
TASK = "text-classification"
CHINESE = {SAMPLE_CSV.name, DOWNLOADED_CSV.name}


def write_results(
    folder: Path,
    info: RunInfo,
    *,
    metrics: dict[str, Any],
    logits: NDArray[np.floating[Any]],
    stage: Callable[[], Path],
) -> str:
    """Write predictions.csv, the model and, last, metrics.json.

    Args:
        metrics: the content of metrics.json, without the hash.
        logits: float (n_test, classes), of the test rows in file order.
        stage: writes the model into a staging directory, as `stage_model` does.

    Returns:
        The hash of the run's results. The logs, which are part of it, must be complete.

    Raises:
        OSError: a file cannot be written, or the folder is gone.
    """
    write_predictions(folder / PREDICTIONS, info.table, info.split.test, logits=logits)
    try:
        staging = stage()
        results_hash = hash_run(folder, staging)
        metrics = metrics | {"hash": results_hash}
        (staging / MODEL_CARD).write_text(model_card(info, metrics), encoding="utf-8")
        commit(staging, folder / MODEL_FOLDER)
    except BaseException:
        shutil.rmtree(folder / MODEL_STAGING, ignore_errors=True)
        raise
    write_json(folder / METRICS.name, metrics)
    return results_hash


def metrics_content(scores: Scores, totals: Totals, peak_memory: Sequence[int]) -> dict[str, Any]:
    """Return the content of metrics.json, except for the hash. `peak_memory` is that of each rank, in bytes."""
    metrics = asdict(scores)
    metrics["n_test"] = metrics.pop("n")
    return metrics | {
        "train_seconds": totals.train_seconds,
        "train_examples_per_second": totals.examples_per_second,
        "train_tokens_per_second": totals.tokens / totals.train_seconds,
        "padding_fraction": 1 - totals.tokens / totals.padded_tokens,
        "skipped_steps": totals.skipped,
        "peak_memory_bytes": list(peak_memory),
    }


def stage_model(folder: Path, model: PreTrainedModel, state: Tensors, *, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write weights, config and tokenizer into a staging directory, so that `pipeline` can load them.

    Args:
        state: the complete state dict; the model itself may be sharded.

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
    if not (folder / SETTINGS.name).is_file():  # the folder was moved away, and save_pretrained created it again
        shutil.rmtree(staging)
        with suppress(OSError):
            folder.rmdir()
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
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


def model_card(info: RunInfo, metrics: Mapping[str, Any]) -> str:
    """Return the text of the model card: YAML front matter for the Hub, then Markdown (after SetFit's model card)."""
    body = render_template(
        "model_card.md.j2",
        base=_base_model(info),
        path_name=info.path_name,
        settings=info.settings,
        model_commit=info.model.commit,
        split=split_content(info),
        class_names=info.table.class_names,
        metrics=metrics,
    )
    return f"---\n{_metadata(info, metrics).to_yaml()}\n---\n\n{body}\n"


def _metadata(info: RunInfo, metrics: Mapping[str, Any]) -> ModelCardData:
    """Return the front matter, without unknown facts such as the language of a user's reviews."""
    csv, model = info.table.path, info.settings.model
    dataset, base = escape_control_characters(csv.stem), _base_model(info)
    results = [
        EvalResult(
            task_type=TASK,
            dataset_type="csv",
            dataset_name=dataset,
            dataset_split="test",
            metric_type=name,
            metric_value=metrics[name],
            metric_name=title,
        )
        for name, title in (("accuracy", "Accuracy"), ("f1", "F1"))
    ]
    return ModelCardData(
        base_model=base if base and not Path(model).is_dir() and _is_repository(base) else None,
        language="zh" if csv.name in CHINESE else None,
        license="unknown",
        library_name="transformers",
        pipeline_tag=TASK,
        datasets=[dataset] if _is_repository(dataset) else None,
        metrics=["accuracy", "f1"],
        model_name=f"{base or 'Text classifier'} trained on {dataset}",
        eval_results=results,
    )


def _base_model(info: RunInfo) -> str | None:
    """Return the name of the model that was fine-tuned, or of its folder; None for a built-in model."""
    model = info.settings.model
    if model in BUILT_IN:
        return None
    return escape_control_characters(Path(model).resolve().name if Path(model).is_dir() else model)


def _is_repository(name: str) -> bool:
    """Return whether the Hub accepts a name in the metadata; it rejects a card with an invalid one."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
