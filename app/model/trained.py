"""Load a classifier that has been trained, to predict with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from ..common.errors import UserError
from ..setting_groups import BUILT_IN
from ..settings import Settings
from .hub import fetch
from .inputs import match_inputs
from .load import load_config, load_tokenizer, max_input_length, select_attention
from .precision import training_dtype


@dataclass(frozen=True)
class TrainedClassifier:
    """A classifier with its tokenizer, and the names of its classes by id."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    class_names: tuple[str, ...]


def load_trained(settings: Settings, device: torch.device, commit: str | None) -> TrainedClassifier:
    """Load a trained classifier on a device, in evaluation mode.

    Args:
        commit: The result of `resolve_commit`.

    Raises:
        UserError: There is no such model, it is not a trained classifier, or `max_length` exceeds what it can process.
    """
    name = settings.model
    if name in BUILT_IN:
        raise UserError(f"`{name}` is untrained: name the folder of a run, a model folder, or a model on the Hub")
    tokenizer, config = load_tokenizer(settings, (), commit), load_config(settings, commit)
    assert config is not None, "only a built-in model has none"
    names = config.id2label or {}
    if len(names) < 2 or config.problem_type not in (None, "single_label_classification"):
        raise UserError(f"{name}: is not a classifier that predicts one of several classes")
    limit = max_input_length(config, tokenizer)
    if settings.max_length > limit:
        raise UserError(f"--max_length {settings.max_length}: {name} accepts at most {limit} tokens")
    select_attention(config, settings, device)
    model, found = fetch(AutoModelForSequenceClassification, settings, commit, config=config, output_loading_info=True)
    if missing := sorted(found["missing_keys"]):
        raise UserError(f"{name}: is not a trained classifier: it has no {missing[0]}; train it first")
    match_inputs(tokenizer, model)
    class_names = tuple(str(names[class_id]) for class_id in sorted(names))  # type: ignore[index]
    return TrainedClassifier(model.to(device, training_dtype(settings.precision)).eval(), tokenizer, class_names)
