"""Load the tokenizer and the classifier from the Hub, from a local folder, or built in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.trainer_utils import align_special_tokens

from ..common.errors import UserError
from ..common.machine import DTYPES
from ..setting_groups import BUILT_IN, TINY, ModelSettings
from ..settings import Settings
from .built_in import VOCABULARY_SIZES, built_in_config, initialize, learn_tokenizer
from .dropout import override_dropout
from .hub import KINDS_OF_WEIGHTS, UNREAD, WEIGHTS, explain, fetch, model_folder
from .identity import check_only_head_is_new, describe_config, match_classes, trained_classes, unused_weights
from .inputs import match_tokenizer

# Architectures derived from RoBERTa: their first position is the padding id plus one.
OFFSET_POSITIONS = {
    *("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet", "xmod", "data2vec-text"),
    *("roberta-prelayernorm", "ibert", "esm", "lilt", "luke", "markuplm", "layoutlmv3"),
}
KINDS: Any = (None, "single_label_classification")  # the `problem_type` of a head for one of several classes
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Classifier:
    """A classifier to train, in training precision."""

    model: PreTrainedModel
    origin: str  # of the weights, for the startup message
    config: dict[str, Any]  # from `describe_config`
    tokens_sha256: str = ""  # of the tokens that it is trained on


def load_tokenizer(
    settings: ModelSettings, train_texts: Iterable[str] | None, *, cache_dir: Path | None = None
) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer or, for a built-in model, learn one from the training rows.

    Args:
        train_texts: None to predict with a trained model.
        cache_dir: Keeps what is learned, for later calls with the same rows.

    Raises:
        UserError: The tokenizer cannot be loaded or cannot pad, or the cache folder cannot be written.
    """
    if settings.model in BUILT_IN and train_texts is not None:
        return learn_tokenizer(train_texts, VOCABULARY_SIZES[settings.model], cache_dir)
    tokenizer: PreTrainedTokenizerBase = fetch(AutoTokenizer, settings)
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):  # transformers does not report missing files
        raise UserError(f"--model {settings.model}: its tokenizer has no vocabulary: are its files missing?")
    try:
        tokenizer.model_max_length = int(min(float(tokenizer.model_max_length), 1e9))  # its file may have any number
    except (TypeError, ValueError):
        problem = f"model_max_length in its {TOKENIZER_CONFIG_FILE} is no number: {tokenizer.model_max_length!r}"
        raise UserError(f"--model {settings.model}: {problem}") from None
    config = fetch(AutoConfig, settings)
    if tokenizer.pad_token_id is None and config.model_type != "funnel":  # which sets the embedding of this token to 0
        # The mask excludes it, but it must not end each text: a classifier may look for the last token before it.
        end, usual = tokenizer("0")["input_ids"][-1:], (tokenizer.eos_token, tokenizer.bos_token, tokenizer.unk_token)
        tokenizer.pad_token = next((t for t in usual if t and tokenizer.convert_tokens_to_ids(t) not in end), None)
    if tokenizer.pad_token_id is None:
        raise UserError(
            f"--model {settings.model}: its tokenizer has no padding token, which batches need: add one and save it"
        )
    # `tokenize` keeps the inputs in this list. RoCBERT's tokenizer returns more than it lists.
    tokenizer.model_input_names = [*dict.fromkeys((*tokenizer.model_input_names, *tokenizer("0"), "attention_mask"))]
    return tokenizer


def classifier_config(
    settings: Settings, class_names: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, device: torch.device = CPU
) -> PretrainedConfig:
    """Return the model's config, with a head for the classes of the data and the attention for the device.

    Raises:
        UserError: The config cannot be loaded, contradicts the tokenizer, or cannot be trained with these settings.
    """
    if settings.model in BUILT_IN:
        config = built_in_config(settings.model, len(tokenizer), tokenizer.pad_token_id)
    else:
        config = fetch(AutoConfig, settings)
    own, pad = getattr(config, "pad_token_id", None), tokenizer.pad_token_id
    if config.model_type in OFFSET_POSITIONS and own not in (None, pad) and is_pretrained(settings.model):
        problem = f"its positions count from pad_token_id {own}, but its tokenizer pads with {pad}: whose is it?"
        raise UserError(f"--model {settings.model}: {problem}")
    check_vocabulary(settings.model, config, pad or 0)  # from_pretrained would fail with an assertion
    config.id2label = dict(enumerate(class_names))
    config.label2id = {name: index for index, name in enumerate(class_names)}
    config.problem_type = KINDS[1]
    config.use_cache = False  # training needs no key-value cache, and the model's choice of kernels may depend on it
    config.return_dict = True  # both training paths access outputs by name
    # With sdpa, a model that returns attentions cannot be saved. If its config, instead of --activation_checkpointing,
    # turned on checkpointing, dropout masks would not be repeated.
    for name in ("output_attentions", "gradient_checkpointing"):
        if getattr(config, name, False):
            setattr(config, name, False)
    # Trainer would do this too late: embeddings take their `padding_idx` from the config when they are built. The
    # function asks for a model, but uses its configs only.
    align_special_tokens(SimpleNamespace(config=config, generation_config=None), tokenizer)
    # Ranks that skip different layers must not gather the parameters of a layer together.
    found = [f"{name} is {value}" for name, value in config.to_dict().items() if "layerdrop" in name and value]
    if found and not (settings.ddp_find_unused_parameters and settings.strategy in ("ddp", "zero1")):
        remedy = "use --strategy ddp or zero1 with --ddp_find_unused_parameters"
        raise UserError(f"--model {settings.model}: {found[0]}, so ranks skip different layers: {remedy}")
    if settings.dropout is not None:
        override_dropout(config, settings.dropout)
    select_attention(config, settings, device)
    usable_length(config, tokenizer, settings.max_length)
    return config


def load_classifier(
    settings: Settings,
    class_names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device = CPU,
    embeddings: NDArray[np.float32] | None = None,
) -> Classifier:
    """Load the classifier in training precision.

    Weights that do not come with the model (the head, or all of them) are initialized from the seed, identically on
    every rank. The tokenizer's `model_input_names` are set to the inputs that the model accepts.

    Args:
        embeddings: The result of `embeddings_of`.

    Raises:
        UserError: As `classifier_config`, or the model cannot classify sequences.
    """
    config = classifier_config(settings, class_names, tokenizer, device=device)
    content = describe_config(config)
    set_seed(settings.seed)
    if is_pretrained(settings.model):
        origin = f"{settings.model} at {settings.revision[:12]}" if settings.revision else settings.model
        model, found = load_weights(settings, config)
        new = check_only_head_is_new(settings.model, model, found)
        own = fetch(AutoConfig, settings)
        origin += f"; new weights: {', '.join(new)}" if new else ""
        n_outputs = {weight: len(parameter) for weight, parameter in model.named_parameters()}
        if not any(weight.endswith("weight") and n_outputs[weight] == len(class_names) for weight in new):
            origin += match_classes(model, trained_classes(own, model_folder(settings)), class_names)
            if own.problem_type not in KINDS:
                origin += f"; keeps its head, which was trained for {own.problem_type}"
            other = [name for name in own.architectures or () if re.search("For(?!SequenceClassification)", name)]
            origin += f"; keeps the head of {other[0]}" if other else ""
        origin += f"; unused weights: {unused}" if (unused := unused_weights(found)) else ""
        kinds = [sorted(Path(settings.model).glob(name)) for name in KINDS_OF_WEIGHTS]
        origin += "".join(f"; {files[0].name} is not read" for files in list(filter(None, kinds))[1:])
    else:
        learned = " and, without labels, from the training reviews" if settings.model == TINY else ""
        origin = f"{settings.model}, initialized from the seed{learned}"
        model = build_from_config(settings, config)
    if embeddings is not None:
        initialize(model, embeddings)
    model.to(training_dtype(settings.precision))
    origin += f"; {depends}" if (depends := match_tokenizer(tokenizer, model, settings)) else ""
    if tokenizer.pad_token in (tokenizer.eos_token, tokenizer.bos_token, tokenizer.unk_token):
        origin += f"; padded with its token {tokenizer.pad_token}"
    origin += "; with full attention" if getattr(config, "attention_type", None) == "original_full" else ""
    return Classifier(model, origin, content)


def load_weights(settings: Settings, config: PretrainedConfig) -> Any:
    """Return the classifier, and what `from_pretrained` reports about its weights, some of which may be new."""
    dtype = training_dtype(settings.precision)  # the config may name a shorter type, to which all would be rounded
    options = {"dtype": dtype, "ignore_mismatched_sizes": True, "output_loading_info": True}
    if config.model_type != "funnel":
        return fetch(AutoModelForSequenceClassification, settings, config=config, **options)
    # The initialization of a Funnel would set the loaded embedding of its padding token to 0.
    pad, config.pad_token_id = config.pad_token_id, None
    model, found = fetch(AutoModelForSequenceClassification, settings, config=config, **options)
    config.pad_token_id = model.config.pad_token_id = pad
    return model, found


def load_trained(
    settings: Settings, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[str | None]]:
    """Return a trained classifier to predict with the classes in its `config.id2label`, its tokenizer, and warnings."""
    name = settings.model
    if name in BUILT_IN:
        raise UserError(f"`{name}` is untrained: name the folder of a run, a model folder, or a model on the Hub")
    tokenizer, config = load_tokenizer(settings, None), fetch(AutoConfig, settings)
    if len(config.id2label or ()) < 2 or config.problem_type not in KINDS:
        raise UserError(f"{name}: is not a classifier that predicts one of several classes")
    select_attention(config, settings, device)
    config.return_dict = True
    # A classifier that reads its last token looks for the last one before this token.
    text_config = config.get_text_config()
    if (pad := getattr(text_config, "pad_token_id", None)) is None:
        text_config.pad_token_id = tokenizer.pad_token_id
    elif pad in range(len(tokenizer)):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    model, found = load_weights(settings, config)
    unused, new = unused_weights(found), check_only_head_is_new(name, model, found)
    if missing := new or sorted(found["missing_keys"]):
        remedy = f", but {unused}" if unused else "; train it first"
        raise UserError(f"{name}: is not a trained classifier: it has no {missing[0]} that fits its config{remedy}")
    depends = match_tokenizer(tokenizer, model, replace(settings, max_length=usable_length(config, tokenizer, None)))
    return model.to(device).eval(), tokenizer, [depends, unused and f"unused weights: {unused}"]


def training_dtype(precision: str) -> torch.dtype:
    """Return the dtype of weights and buffers."""
    return torch.float64 if precision == "fp64" else torch.float32


def mixed_precision(precision: str, device: torch.device) -> torch.autocast:
    """Return the context of a forward pass. With bf16 or fp16, it multiplies matrices in it; weights stay in fp32."""
    enabled = precision in ("bf16", "fp16")
    return torch.autocast(device.type, dtype=DTYPES[precision] if enabled else torch.bfloat16, enabled=enabled)


def select_attention(config: PretrainedConfig, settings: Settings, device: torch.device) -> None:
    """Select the attention implementation: the requested one, the config's own, or the fastest one to train with.

    On CPUs, PyTorch's fused attention computes attention with dropout step by step, in fp32, and its backward pass in
    bf16 is slow.
    """
    if getattr(config, "attention_type", None) == "block_sparse":
        config.attention_type = "original_full"  # a BigBird switches to it at its first short batch, and never back
    if config.model_type == "reformer":
        problem = "recomputes layers with other dropout masks, and its LSH attention depends on its first batch"
        raise UserError(f"--model {settings.model}: a Reformer {problem}")
    chosen = settings.attn_implementation or getattr(config, "_attn_implementation", None)
    fused_is_fast = settings.dropout == 0 and settings.precision in {"fp32", "fp64"}
    config._attn_implementation = chosen or ("eager" if device.type == "cpu" and not fused_is_fast else None)


def is_pretrained(model: str) -> bool:
    """Tell whether the model has weights of its own. Otherwise all are initialized from the seed."""
    if model in BUILT_IN:
        return False
    folder = Path(model)
    pretrained = not folder.is_dir() or any(any(folder.glob(name)) for name in WEIGHTS)
    if not pretrained and (others := [path for name in UNREAD for path in sorted(folder.glob(name))]):
        raise UserError(f"--model {model}: weights in {others[0]} are not read: save them as {model}/model.safetensors")
    return pretrained


def build_from_config(settings: Settings, config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Return a classifier with new weights, with options of `from_config`, such as `dtype`.

    Raises:
        UserError: the model cannot classify sequences, or the attention implementation cannot be used.
    """
    options["trust_remote_code"] = settings.trust_remote_code
    try:
        return AutoModelForSequenceClassification.from_config(config, **options)  # type: ignore[no-any-return]
    except Exception as problem:
        raise UserError(f"--model {settings.model}: {explain(problem)}") from None


def check_vocabulary(model: str, config: PretrainedConfig, token_id: int) -> None:
    """Raise a UserError if the model has no embedding of a token that its tokenizer returns."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    if size is not None and token_id >= size:
        raise UserError(
            f"--model {model}: its tokenizer returns token id {token_id}, but its config has vocab_size {size}: resize "
            "the model's embeddings, or use the tokenizer that belongs to it"
        )


def usable_length(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, requested: int | None) -> int:
    """Return the number of tokens at which texts are cut: the requested one or, as by `pipeline`, the tokenizer's.

    Raises:
        UserError: the model accepts fewer tokens than requested.
    """
    name, config, limit = tokenizer.name_or_path, config.get_text_config(), tokenizer.model_max_length
    found = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
    if (positions := next(filter(None, found), 0)) > 0:
        pad = 1 if config.model_type == "mpnet" else getattr(config, "pad_token_id", None) or 0
        limit = int(positions) - (pad + 1 if config.model_type in OFFSET_POSITIONS else 0)
    if requested is not None and requested > limit:
        raise UserError(f"--max_length {requested}: {name or 'the model'} accepts at most {limit} tokens")
    return requested or min(limit, tokenizer.model_max_length)
