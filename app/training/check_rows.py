"""Check that a model can process the tokens of every review."""

from __future__ import annotations

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PretrainedConfig

from ..common.errors import UserError
from ..data.reviews import ReviewTable, list_rows
from ..data.tokenize import count_of_tokens
from ..model.load import end_of_sequence
from ..settings import Settings


def check_rows(
    settings: Settings,
    config: PretrainedConfig,
    *,
    table: ReviewTable,
    rows: Dataset,
    lengths: NDArray[np.int64],
    tokens: NDArray[np.int64],
) -> None:
    """Check that the model can process the tokens of every review: training would end with a failure otherwise.

    Args:
        rows: the tokens of all reviews, in the order of the table.
        lengths: int64 (n,), the number of tokens of each review.
        tokens: the ids that occur in any of them, sorted.

    Raises:
        UserError: names the rows that it cannot process, and the remedy.
    """
    if not lengths.all():
        raise UserError(
            f"{table.path}: {_count(lengths == 0)} without any token for the tokenizer of --model {settings.model}: "
            f"remove {list_rows(table.rows[lengths == 0])}, or configure the tokenizer to add special tokens"
        )
    too_long = lengths > settings.max_length
    if too_long.any():
        raise UserError(
            f"--model {settings.model}: its tokenizer returns up to {lengths.max()} tokens per review despite "
            f"--max_length {settings.max_length}, for example for {list_rows(table.rows[too_long])}: raise "
            "--max_length, or use a tokenizer that truncates"
        )
    size = getattr(config.get_text_config(), "vocab_size", None)
    if size is not None and tokens[-1] >= size:
        raise UserError(
            f"--model {settings.model}: its tokenizer returns token id {tokens[-1]}, but its config has vocab_size "
            f"{size}: resize the model's embeddings, or use the tokenizer that belongs to it"
        )
    if config.is_encoder_decoder:
        _check_end_of_sequence(settings.model, table, count_of_tokens(rows, end_of_sequence(config)))


def _check_end_of_sequence(model: str, table: ReviewTable, counts: NDArray[np.int64]) -> None:
    """Check that encoder-decoders, which classify by the end-of-sequence token, find it as often in each review.

    They reject a batch in which one row has more of them than another. A review has more if it contains the token's
    text, such as `</s>`. It has fewer if most reviews do, or if the tokenizer does not append the token to it.
    """
    usual = int(np.bincount(counts).argmax())
    more, fewer = counts > usual, counts < usual
    if more.any():
        raise UserError(
            f"{table.path}: {_count(more)} containing the text of the end-of-sequence token, by which --model "
            f"{model} classifies: remove it from {list_rows(table.rows[more])}"
        )
    if fewer.any():
        raise UserError(
            f"{table.path}: {_count(fewer)} with fewer end-of-sequence tokens, by which --model {model} "
            f"classifies, than the others, which have {usual}: remove {list_rows(table.rows[fewer])}, or use a "
            "tokenizer that returns as many for every review"
        )


def _count(selected: NDArray[np.bool_]) -> str:
    n = int(selected.sum())
    return f"{n:,} review{'s' * (n != 1)}"
