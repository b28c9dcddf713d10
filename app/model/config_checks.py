"""Check that a model's config matches its tokenizer and the settings, before the model is built."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ..common.errors import UserError
from ..settings import Settings


def check_config(settings: Settings, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a classifier with this config, which `align_with_trainer` has changed, can be trained.

    Raises:
        UserError: it cannot, and the message names what to change.
    """
    model, text_config = settings.model, config.get_text_config()
    size, token_id = getattr(text_config, "vocab_size", None), text_config.pad_token_id
    if size is not None and token_id is not None and token_id >= size:
        raise UserError(
            f"--model {model}: its tokenizer's padding token has id {token_id}, but its config has vocab_size "
            f"{size}: resize the model's embeddings, or use a padding token in its vocabulary"
        )
    # Encoder-decoders such as BART and T5 classify the hidden state of this token.
    if config.is_encoder_decoder and not end_of_sequence(config) & set(tokenizer("a")["input_ids"]):
        raise UserError(
            f"--model {model}: classifies by the end-of-sequence token, but its tokenizer does not append "
            "one: configure the tokenizer to append it"
        )
    for name, value in config.to_dict().items():
        if not ("layerdrop" in name and value):
            continue
        if settings.strategy in ("zero2", "zero3"):  # their ranks gather the parameters of each layer together
            raise UserError(
                f"--model {model}: its config sets {name} to {value}, so ranks skip different layers, which "
                f"--strategy {settings.strategy} cannot: use ddp or zero1"
            )
        if not settings.ddp_find_unused_parameters:
            raise UserError(
                f"--model {model}: its config sets {name} to {value}, so training steps skip layers: add "
                "--ddp_find_unused_parameters"
            )


def end_of_sequence(config: PretrainedConfig) -> set[int]:
    """Return the ids of the tokens that end a text."""
    end = getattr(config, "eos_token_id", None)
    return set(end if isinstance(end, list) else [] if end is None else [end])
