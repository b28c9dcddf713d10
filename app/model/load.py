"""The tokenizer and the classifier: from the Hub, from a local folder, or `tiny`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    logging,
)

from app.errors import UserError
from app.model.hub import _check_folder, _fetch, _first_line
from app.model.tiny_bert import learn_tokenizer, tiny_config
from app.settings import TINY, ModelSettings, Settings

WEIGHT_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


@dataclass(frozen=True)
class Classifier:
    """A model with what a run says of it: `pretrained` is False where the weights come from the seed."""

    model: PreTrainedModel
    pretrained: bool
    origin: str


def load_tokenizer(
    settings: ModelSettings, train_texts: Iterable[str], commit: str | None = None
) -> PreTrainedTokenizerBase:
    """The model's own tokenizer, or for `tiny` one learned from the training rows.

    Args:
        commit: what `resolve_commit` has returned.

    Raises:
        UserError: no such model, or no tokenizer in its folder, or the Hub can't be reached.
    """
    if settings.model == TINY:
        return learn_tokenizer(train_texts)
    _check_folder(settings.model)
    tokenizer: PreTrainedTokenizerBase = _fetch(AutoTokenizer, settings, commit)
    if tokenizer.pad_token_id is None:
        raise UserError(f"--model {settings.model}: its tokenizer has no padding token, which batches need")
    return tokenizer


def load_config(settings: ModelSettings, commit: str | None = None) -> PretrainedConfig | None:
    """The config of the model asked for; None for `tiny`, whose config depends on the vocabulary.

    Args:
        commit: what `resolve_commit` has returned.

    Raises:
        UserError: no such model, or the Hub can't be reached.
    """
    if settings.model == TINY:
        return None
    _check_folder(settings.model)
    config: PretrainedConfig = _fetch(AutoConfig, settings, commit)
    return config


def load_classifier(
    settings: Settings, class_names: Sequence[str], tokenizer: PreTrainedTokenizerBase, commit: str | None = None
) -> Classifier:
    """The classifier in training precision, its head sized and named by the data's classes.

    Weights that don't come with the model (the head, or all of them) are drawn from the seed: the same on every rank.

    Args:
        tokenizer: the model's. Its `model_input_names` become the inputs that the model takes.
        commit: what `resolve_commit` has returned.

    Raises:
        UserError: no such model, one that can't classify sequences, one that doesn't fit its tokenizer, or
            `max_length` beyond what it can read.
    """
    fetched = load_config(settings, commit)
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
    align_with_trainer(config, tokenizer)
    _check_padding(settings, config)
    _check_end_of_sequence(settings, config, tokenizer)
    _check_layerdrop(settings, config)
    if settings.dropout is not None:
        override_dropout(config, settings.dropout)
    longest = longest_input(config, tokenizer)
    if settings.max_length > longest:
        raise UserError(f"--max_length {settings.max_length}: {settings.model} reads {longest} tokens at most")

    set_seed(settings.seed)
    if pretrained:
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # its report of the new head is one line in our start-up block instead
        model = _fetch(
            AutoModelForSequenceClassification, settings, commit, config=config, ignore_mismatched_sizes=True
        )
        logging.set_verbosity(verbosity)
    else:
        try:
            model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=settings.trust_remote_code)
        except (ValueError, AttributeError, TypeError) as problem:
            raise UserError(f"--model {settings.model}: {_first_line(problem)}") from None
    # Classification heads take **kwargs but don't normalise by num_items_in_batch, as Trainer believes of models that
    # do: it would multiply loss and gradients by world size x accumulation steps (huggingface/transformers#47688).
    model.accepts_loss_kwargs = False
    _match_inputs(tokenizer, model)
    model.register_forward_hook(_make_gradients_nan_if_loss_is_nonfinite)
    model.to(torch.float64 if settings.precision == "fp64" else torch.float32)
    return Classifier(model, pretrained, origin)


def _make_gradients_nan_if_loss_is_nonfinite(model: torch.nn.Module, inputs: Any, outputs: Any) -> None:
    """Make every gradient NaN if the loss is not finite, so that all ranks see it in the norm.

    Without this, an infinite loss can have finite gradients (cross-entropy over logits that are far apart). A finite
    loss is multiplied by 1.0, which changes no bit of it.
    """
    if isinstance(outputs, dict) and outputs.get("loss") is not None:  # remote code may return a tuple
        outputs["loss"] = outputs["loss"] * (1 + 0 * outputs["loss"].detach())


def align_with_trainer(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make every change to the config that Trainer would make to a model's, so that it finds nothing to change.

    It would come too late there: embeddings take their `padding_idx` from the config when they are built.
    """
    config.use_cache = False  # training needs no cache of keys and values, and a model's kernels may depend on it
    config.return_dict = True  # both training paths read outputs by name
    text_config = config.get_text_config()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token_id, declared = getattr(tokenizer, name), getattr(text_config, name, None)
        if token_id is None or token_id == declared:
            continue
        if isinstance(declared, list):  # several tokens can end a text: keep the others
            if token_id in declared:
                continue
            token_id = [token_id, *declared] if name == "eos_token_id" else token_id
        setattr(text_config, name, token_id)


def _check_padding(settings: Settings, config: PretrainedConfig) -> None:
    text_config = config.get_text_config()
    size, token_id = getattr(text_config, "vocab_size", None), text_config.pad_token_id
    if size is not None and token_id is not None and token_id >= size:
        raise UserError(
            f"--model {settings.model}: the id of its tokenizer's padding token is {token_id}, but its config has "
            f"vocab_size {size}: resize the model's embeddings, or use a padding token that it knows"
        )


def _check_end_of_sequence(settings: Settings, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Encoder-decoders such as BART and T5 classify what they read at the end-of-sequence token."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if config.is_encoder_decoder and not set(ends) & set(tokenizer("a")["input_ids"]):
        raise UserError(
            f"--model {settings.model}: classifies by the end-of-sequence token, which its tokenizer does not add to a "
            "text: set one that does"
        )


def _check_layerdrop(settings: Settings, config: PretrainedConfig) -> None:
    """LayerDrop skips layers on each rank by chance. DDP must know, or a rank waits for gradients that never come."""
    for name, value in config.to_dict().items():
        if "layerdrop" in name and value and not settings.ddp_find_unused_parameters:
            raise UserError(
                f"--model {settings.model}: its config sets {name} to {value}, so steps leave out layers: add "
                "--ddp_find_unused_parameters"
            )


def _match_inputs(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Let the tokenizer yield what the model takes, whatever its own configuration says.

    Without the mask a model would read padding as text, and it may refuse or misread an input that it doesn't name.
    """
    takes = inspect.signature(model.forward).parameters
    if "input_ids" not in takes:
        return  # a wrapper around the actual model, whose arguments can't be known
    names = [name for name in tokenizer.model_input_names if name in takes]
    if "attention_mask" in takes and "attention_mask" not in names:
        names.append("attention_mask")
    if names != list(tokenizer.model_input_names):
        tokenizer.model_input_names = names
        tokenizer.init_kwargs["model_input_names"] = names  # what save_pretrained writes


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
