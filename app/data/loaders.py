"""Form batches of token ids: the arguments of loaders, and this rank's share of an eval set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset
from transformers import DataCollatorWithPadding

from ..distributed.world import World


@dataclass(frozen=True)
class EvalSet:
    """Rows to evaluate, and this rank's share of them.

    Every rank has the same number of batches, because the forward pass of a sharded model is a collective.
    """

    name: str  # `validation` or `test`
    labels: NDArray[np.int64]  # class ids of all n rows, in file order
    loader: DataLoader[Any]  # this rank's batches
    is_filler: Sequence[bool]  # for each batch, whether it only makes the numbers equal: its logits must not be used
    positions: Sequence[int]  # of this rank's rows among the n rows, in the order of the batches, without filler
    positive_class: int = 1  # of two classes, the id of the one whose F1 is computed


def form_eval_batches(lengths: NDArray[np.int64], batch_size: int) -> list[list[int]]:
    """Sort rows by length and divide them into batches, whose size affects padding, and thereby rounding.

    The longest come first: while batches become longer, the free memory of the shorter ones is too small for them.
    """
    by_length = np.argsort(lengths, kind="stable").tolist()
    return [by_length[start : start + batch_size] for start in range(0, len(by_length), batch_size)][::-1]


def build_eval_set(
    name: str,
    rows: Dataset[Any],
    labels: NDArray[np.int64],
    *,
    batches: list[list[int]],
    collator: DataCollatorWithPadding,
    world: World,
) -> EvalSet:
    """Assign the batches of all rows to the ranks in turn: each row is on exactly one rank.

    The batches, and with them padding and logits, are the same at any number of ranks. `DistributedSampler` would
    assign single rows, and repeat the first ones to make the shares equal (pytorch#25162). All ranks have the same
    work, because the batches are sorted by length.
    """
    own = batches[world.rank :: world.size]
    filler = [batches[-1][:1]] * (math.ceil(len(batches) / world.size) - len(own))
    loader: DataLoader[Any] = DataLoader(rows, batch_sampler=own + filler, **loader_options(collator, world.device))
    positions = [position for batch in own for position in batch]
    return EvalSet(name, labels, loader, [False] * len(own) + [True] * len(filler), positions)


def loader_options(collator: DataCollatorWithPadding, device: torch.device) -> dict[str, Any]:
    """Return the arguments that all loaders share. Their batches are copied to the device."""
    return {
        "collate_fn": collator,
        # With a generator of its own, iterating does not draw from the global random number generator.
        "generator": torch.Generator().manual_seed(0),
        "pin_memory": device.type == "cuda",
    }
