"""The model card: what the model was trained on, its test results, and how to use it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ..common.errors import escape_control_characters
from ..common.formats import template_environment
from ..common.paths import DOWNLOADED_CSV, SAMPLE_CSV
from ..setting_groups import TINY
from .json_files import RunInfo, split_content

TASK = "text-classification"
CHINESE = {SAMPLE_CSV.name, DOWNLOADED_CSV.name}


def model_card(info: RunInfo, metrics: Mapping[str, Any]) -> str:
    """Return the text of the model card: YAML front matter for the Hub, then Markdown (after SetFit's model card).

    Args:
        metrics: the content of metrics.json.
    """
    body = (
        template_environment(Path(__file__).with_name("templates"))
        .get_template("model_card.md.j2")
        .render(
            base=_base_model(info),
            path_name=info.path_name,
            settings=info.settings,
            model_commit=info.model.commit,
            split=split_content(info),
            class_names=info.table.class_names,
            metrics=metrics,
        )
    )
    return f"---\n{_metadata(info, metrics).to_yaml()}\n---\n\n{body}\n"


def _metadata(info: RunInfo, metrics: Mapping[str, Any]) -> ModelCardData:
    """Return the front matter. It leaves out what is unknown, such as the language of a user's reviews."""
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
    """Return the name of the model that was fine-tuned, or of its folder; None for `tiny`."""
    model = info.settings.model
    if model == TINY:
        return None
    return escape_control_characters(Path(model).resolve().name if Path(model).is_dir() else model)


def _is_repository(name: str) -> bool:
    """Return whether the Hub accepts a name in the metadata; it rejects a card with an invalid one."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
