"""The models whose steps are measured: BERTs of `flags.SIZES`, and any `--model` of training, with random weights."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel, set_seed

from ...common.errors import UserError
from ...flags import SIZES
from ...model.hub import resolve_commit
from ...model.load import build_from_config, load_config, select_attention
from ...model.tiny import VOCABULARY_SIZES, built_in_config
from ...plan.step import device_of
from ...settings import Settings
from ..steps import bert_config


def model_config(name: str, use_cpu: bool) -> PretrainedConfig:
    """Return the config of a classifier of two classes: of `SIZES`, or by a name or a folder as in training.

    Raises:
        UserError: there is no such model, or the Hub cannot be reached.
    """
    if name in SIZES:
        return bert_config(name)
    settings = Settings(model=name, use_cpu=use_cpu)
    config = load_config(settings, resolve_commit(settings))
    config = config or built_in_config(name, VOCABULARY_SIZES[name], pad_token_id=0)
    config.id2label, config.label2id = {0: "0", 1: "1"}, {"0": 0, "1": 1}
    config.problem_type = "single_label_classification"
    if config.pad_token_id is None:  # rows are not padded, but classifiers such as GPT-2's ask for it
        config.pad_token_id = 0
    select_attention(config, settings, device_of(use_cpu))
    return config


def build_classifier(name: str, settings: Settings) -> PreTrainedModel:
    """Build the model with the same random weights on every rank, on the CPU."""
    config = model_config(name, settings.use_cpu)
    set_seed(settings.seed)
    return build_from_config(settings, config)


def check_length(config: PretrainedConfig, length: int) -> None:
    """Raise `UserError` if rows are longer than what the model has positions for."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions and length > positions:
        raise UserError(f"--length {length}: must be at most {positions}, the positions that the model has")
