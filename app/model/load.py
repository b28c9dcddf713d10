"""The tokenizer and the classifier: from the Hub, from a local folder, or `tiny`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME, logging

from app.errors import UserError
from app.model.tiny_bert import learn_tokenizer, tiny_config
from app.settings import TINY, ModelSettings, Settings

WEIGHT_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


@dataclass(frozen=True)
class Classifier:
    """A model with what a run says of it: `pretrained` is False where the weights come from the seed."""

    model: PreTrainedModel
    pretrained: bool
    origin: str


def load_tokenizer(settings: ModelSettings, train_texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """The model's own tokenizer, or for `tiny` one learned from the training rows.

    Raises:
        UserError: no such model, or no tokenizer in its folder, or the Hub can't be reached.
    """
    if settings.model == TINY:
        return learn_tokenizer(train_texts)
    _check_folder(settings.model)
    tokenizer: PreTrainedTokenizerBase = _fetch(AutoTokenizer, settings)
    if tokenizer.pad_token_id is None:
        raise UserError(f"--model {settings.model}: its tokenizer has no padding token, which batches need")
    return tokenizer


def load_config(settings: ModelSettings) -> PretrainedConfig | None:
    """The config of the model asked for; None for `tiny`, whose config depends on the vocabulary.

    Raises:
        UserError: no such model, or the Hub can't be reached.
    """
    if settings.model == TINY:
        return None
    _check_folder(settings.model)
    config: PretrainedConfig = _fetch(AutoConfig, settings)
    return config


def load_classifier(settings: Settings, class_names: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Classifier:
    """The classifier in training precision, its head sized and named by the data's classes.

    Weights that don't come with the model (the head, or all of them) are drawn from the seed: the same on every rank.

    Raises:
        UserError: no such model, one that can't classify sequences, or `max_length` beyond what it can read.
    """
    fetched = load_config(settings)
    if fetched is None:
        config: PretrainedConfig = tiny_config(len(tokenizer), tokenizer.pad_token_id)
        pretrained, origin = False, "tiny BERT (2 layers x 128), weights from the seed"
    else:
        config = fetched
        pretrained = not Path(settings.model).is_dir() or any((Path(settings.model) / f).exists() for f in WEIGHT_FILES)
        origin = settings.model if pretrained else f"{settings.model} has no weights: they come from the seed"
    config.id2label = dict(enumerate(class_names))
    config.label2id = {name: index for index, name in enumerate(class_names)}
    config.problem_type = "single_label_classification"
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = tokenizer.pad_token_id
    if settings.dropout is not None:
        override_dropout(config, settings.dropout)
    longest = longest_input(config, tokenizer)
    if settings.max_length > longest:
        raise UserError(f"--max_length {settings.max_length}: {settings.model} reads {longest} tokens at most")

    set_seed(settings.seed)
    if pretrained:
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # its report of the new head is one line in our start-up block instead
        model = _fetch(AutoModelForSequenceClassification, settings, config=config, ignore_mismatched_sizes=True)
        logging.set_verbosity(verbosity)
    else:
        try:
            model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=settings.trust_remote_code)
        except (ValueError, AttributeError, TypeError) as problem:
            raise UserError(f"--model {settings.model}: {_first_line(problem)}") from None
    # Classification heads take **kwargs but don't normalise by num_items_in_batch, as Trainer believes of models that
    # do: it would multiply loss and gradients by world size x accumulation steps (huggingface/transformers#47688).
    model.accepts_loss_kwargs = False
    model.register_forward_hook(_spread_what_is_not_finite)
    model.to(torch.float64 if settings.precision == "fp64" else torch.float32)
    return Classifier(model, pretrained, origin)


def _spread_what_is_not_finite(model: torch.nn.Module, inputs: Any, outputs: Any) -> None:
    """A loss that isn't finite makes every gradient NaN, so that all ranks see it in the norm, without a message of
    their own. Else it wouldn't always: a cross-entropy over logits that are far apart can be infinite with finite
    gradients. A finite loss is multiplied by 1.0, which changes no bit of it."""
    if outputs.get("loss") is not None:
        outputs["loss"] = outputs["loss"] * (1 + 0 * outputs["loss"].detach())


def override_dropout(config: PretrainedConfig, probability: float) -> None:
    """Sets every dropout probability of a model's config, whatever the architecture calls it.

    LayerDrop, which skips whole layers, is something else and stays.
    """
    for name, value in config.to_dict().items():
        is_number = value is None or (isinstance(value, float | int) and not isinstance(value, bool))
        if is_number and ("dropout" in name or "pdrop" in name):
            setattr(config, name, probability)


def longest_input(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens that the model can read. RoBERTa's kin count positions from the padding id on, and so lose that many."""
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if not positions or positions < 0:
        return int(tokenizer.model_max_length)
    offset = (config.pad_token_id or 0) + 1 if config.model_type in OFFSET_POSITIONS else 0
    return int(min(positions - offset, tokenizer.model_max_length))


OFFSET_POSITIONS = {
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "camembert",
    "longformer",
    "mpnet",
    "xmod",
    "data2vec-text",
}


def _check_folder(model: str) -> None:
    """A name that can only mean a local folder must be one: the Hub would answer with something about repo ids."""
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"--model {model}: the folder has no config.json, so it is no model")
    elif path.exists():
        raise UserError(f"--model {model}: is a file; must be a folder, a name on the Hub, or `{TINY}`")
    elif model.startswith((".", "/", "~")) or model.count("/") > 1 or not model.strip():
        raise UserError(f"--model {model}: no such folder")


def _fetch(auto_class: Any, settings: ModelSettings, **more: Any) -> Any:
    is_folder = Path(settings.model).is_dir()
    offline = not is_folder and not _on_the_hub(settings.model)
    try:
        return auto_class.from_pretrained(
            settings.model, trust_remote_code=settings.trust_remote_code, local_files_only=offline, **more
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as problem:
        # Hub errors subclass OSError; an unknown architecture or one without this head is a ValueError or KeyError.
        what = "can't be loaded: " + _first_line(problem)
        if offline:
            what = "the Hub can't be reached, and the model is not in the local cache"
        raise UserError(f"--model {settings.model}: {what}") from None


@cache
def _on_the_hub(name: str) -> bool:
    """True where the Hub answers that it has the model; False where it doesn't answer. One try and at most 10 seconds:
    transformers alone would try six times an asked file, for a minute, and write of each."""
    try:
        HfApi().model_info(name, timeout=10)
    except RepositoryNotFoundError:
        raise UserError(f"--model {name}: no such model on the Hub (or it is private: `hf auth login` first)") from None
    except HFValidationError:
        raise UserError(f"--model {name}: no folder, no name on the Hub, and not `{TINY}`") from None
    except Exception:  # the HTTP library's own errors: another one with each version of huggingface_hub
        return False
    return True


def _first_line(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return lines[0] if lines else type(problem).__name__
