"""Train only the embeddings of tokens that occur in the reviews.

BERT for Chinese has 21,128 tokens, of which the hotel reviews contain 3,200. The other rows of its embedding matrix get
a gradient of zero in every step, which is still filled with zeros, summed over the ranks and processed by AdamW. So the
model that is trained has only the rows of tokens that occur. The remaining rows stay on rank 0 and take no part in the
training step. AdamW would only apply weight decay to them, which `decay` does with the same rounding. Saved models have
all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

USED_AT_MOST = 0.9  # of all tokens; with more, trimming the matrix would save very little


@dataclass
class TrimmedVocabulary:
    """The rows of an embedding matrix: those that are trained, and those that are not."""

    names: tuple[str, ...]  # of the parameter in the model's state dict; several if it is tied
    used: torch.Tensor  # the token ids of the rows that the model has, int64, sorted
    unused: torch.Tensor  # all other token ids, int64, sorted
    width: int  # elements of a row
    rows: torch.Tensor | None = None  # those of the unused ids, (len(unused), width), on the CPU of rank 0

    def __str__(self) -> str:
        return f"{len(self.used):,} of {len(self.used) + len(self.unused):,} tokens: only these occur and are trained"

    @torch.no_grad()
    def decay(self, learning_rates: Iterable[float], weight_decay: float) -> None:
        """Apply the weight decay of some optimizer steps, rounded as fused AdamW does on a CPU.

        The factor of a step is about 1 - learning_rate * weight_decay, but compilers may round this expression once or
        twice. So AdamW itself computes the factors, from elements that are 1, without gradient and moments.
        """
        if self.rows is None or weight_decay == 0:
            return
        ones = torch.nn.Parameter(self.rows.new_ones(16))  # as many as fill a vector register
        ones.grad = torch.zeros_like(ones)
        optimizer, factors = torch.optim.AdamW([ones], weight_decay=weight_decay, fused=True), []
        for optimizer.param_groups[0]["lr"] in learning_rates:
            optimizer.step()
            factors.append(ones[0].item())
            ones.fill_(1)
        for block in self.rows.view(-1).split(1 << 16):  # 256 KiB, which fit into a core's cache
            for factor in factors:
                block.mul_(factor)


def trimmed_vocabulary(model: torch.nn.Module) -> TrimmedVocabulary | None:
    """Return what `trim_vocabulary` has kept; None if the model has all rows."""
    return getattr(model, "trimmed_vocabulary", None)


@torch.no_grad()
def trim_vocabulary(model: PreTrainedModel, tokens: NDArray[np.int64], *, keep_unused: bool) -> None:
    """Replace the embedding matrix by the rows of some tokens. Inputs remain the ids of the complete vocabulary.

    Does nothing if the model needs nearly all rows, does not train them, or uses the matrix for anything else.

    Args:
        tokens: the ids of all tokens that the model may get, sorted.
        keep_unused: whether this rank keeps the other rows.
    """
    owners = embeddings_to_trim(model, len(tokens))
    if not owners:
        return
    weight = owners[0].weight
    names = tuple(name for name, p in model.named_parameters(remove_duplicate=False) if p is weight)
    # Unlike from_numpy, torch.tensor also returns tensors without data, for app.plan.
    used, unused = torch.tensor(tokens), torch.tensor(np.setdiff1d(np.arange(len(weight)), tokens))
    rows = weight[unused].cpu() if keep_unused else None
    positions = torch.full((len(weight),), len(tokens))  # an unexpected token raises an IndexError
    positions[used] = torch.arange(len(tokens))
    padding_idx: Any = owners[0].padding_idx
    padding_idx = int(np.searchsorted(tokens, padding_idx)) if padding_idx in tokens else None
    parameter = torch.nn.Parameter(weight[used])
    for module in owners:
        module.weight, module.num_embeddings, module.padding_idx = parameter, len(tokens), padding_idx
        # A module's buffers are moved to its device; this one is not part of the model's state.
        module.register_buffer("positions", positions, persistent=False)
        module.register_forward_pre_hook(_look_up, with_kwargs=True)
    model.trimmed_vocabulary = TrimmedVocabulary(names, used, unused, weight.shape[1], rows)  # type: ignore[assignment]


def embeddings_to_trim(model: PreTrainedModel, n_used: int) -> list[torch.nn.Embedding]:
    """Return the modules that hold the embedding matrix of the tokens, of which a model needs `n_used` rows.

    Returns an empty list if the matrix must not be trimmed, or if it is not worth trimming.
    """
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # a model without such a matrix
        return []
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    if weight is None or not weight.requires_grad or len(weight) != size or n_used > USED_AT_MOST * size:
        return []
    owners: list[Any] = [module for module in model.modules() if any(p is weight for p in module._parameters.values())]
    return owners if all(isinstance(module, torch.nn.Embedding) for module in owners) else []


def _look_up(module: Any, args: Any, kwargs: dict[str, torch.Tensor]) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    (ids,) = args or kwargs.values()
    return (module.positions[ids],), {}


def tokens_of_model(
    occurring: NDArray[np.int64], tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig
) -> NDArray[np.int64]:
    """Return the ids of the tokens that a model may get: those in the reviews, and special ones that it adds itself."""
    text_config = config.get_text_config()
    names = ("pad", "bos", "eos", "decoder_start", "cls", "sep", "mask")
    added: list[Any] = [getattr(text_config, f"{name}_token_id", None) for name in names]  # a number, or several
    added += [0] if "token_type_ids" in tokenizer.model_input_names else []  # GPT-2 embeds types as tokens
    ids = np.union1d(occurring, np.hstack([one for one in (*added, *tokenizer.all_special_ids) if one is not None]))
    return ids[(ids >= 0) & (ids < getattr(text_config, "vocab_size", 0))]


def complete_state(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's state dict with the rows of all tokens. Call it on rank 0, with a complete state dict."""
    if (vocabulary := trimmed_vocabulary(model)) is None:
        return dict(state)
    assert vocabulary.rows is not None
    trained = state[vocabulary.names[0]]
    complete = trained.new_empty(len(vocabulary.used) + len(vocabulary.unused), vocabulary.width)
    complete[vocabulary.used] = trained
    complete[vocabulary.unused] = vocabulary.rows.to(trained)
    return dict(state) | dict.fromkeys(vocabulary.names, complete)
