"""Compute the logits of rows with a trained model, in segments that an interrupted prediction need not repeat."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from tqdm import tqdm

from ..common.errors import RunError
from ..common.terminal import hides_progress
from ..data.loaders import Collator, loader_options
from ..data.tokenize import TokenRows
from ..distributed.collectives import broadcast_object, gather_rows, write_on_ranks
from ..distributed.world import World
from ..model.inputs import to_device
from ..model.load import TrainedClassifier
from ..model.precision import mixed_precision
from ..settings import Settings
from .partial import PartialLogits

SEGMENT = 2**14  # rows, about, that are gathered and kept at once


@torch.no_grad()
def compute_logits(
    classifier: TrainedClassifier,
    rows: TokenRows,
    *,
    batches: Sequence[list[int]],
    settings: Settings,
    partial: PartialLogits | None,
    world: World,
) -> NDArray[np.float64]:
    """Return the logits of all rows, float64 (n, classes): on rank 0 only, others may lack some. Collective.

    The batches, and with them the logits, are the same at any number of ranks.

    Args:
        batches: the positions of all rows, as returned by `form_eval_batches`.
        partial: on rank 0, the segments that an earlier attempt has computed; None to keep none.

    Raises:
        RunError: a file cannot be written, or logits are not finite.
    """
    logits = np.empty((len(rows), len(classifier.class_names)))
    per_segment = max(1, SEGMENT // settings.eval_batch_size)
    hide_bar = hides_progress(settings.disable_tqdm, world.is_main_process)
    with tqdm(total=len(rows), desc="predicting", unit=" reviews", disable=hide_bar) as bar:
        for number, first in enumerate(range(0, len(batches), per_segment)):
            segment = batches[first : first + per_segment]
            positions = np.concatenate(segment)
            found = partial.read(number, (len(positions), logits.shape[1])) if partial is not None else None
            if not broadcast_object(found is not None, world):
                found = _compute_segment(classifier, rows, segment=segment, settings=settings, bar=bar, world=world)
                _keep(partial, number, logits=found, world=world)
            else:
                bar.update(len(positions))
            if found is not None:
                logits[positions] = found
    return logits


def _compute_segment(
    classifier: TrainedClassifier,
    rows: TokenRows,
    *,
    segment: Sequence[list[int]],
    settings: Settings,
    bar: tqdm[Any],
    world: World,
) -> NDArray[np.float64]:
    """Return the logits of some batches, in their order, on every rank. Collective."""
    model, collator = classifier.model, Collator(classifier.tokenizer, pad_to_multiple_of=settings.pad_to_multiple_of)
    own = segment[world.rank :: world.size]
    loader = DataLoader(rows, batch_sampler=own, **loader_options(collator, world.device))
    shard = [torch.empty(0, len(classifier.class_names), dtype=torch.float64, device=world.device)]
    for batch in loader:
        inputs = to_device(batch, model, world)
        n = len(inputs.pop("labels"))
        with mixed_precision(settings.precision, world.device):
            shard.append(model(**inputs).logits.double())
        bar.update(min(n * world.size, len(rows) - bar.n))  # the other ranks are about as far
    places = np.split(np.arange(sum(map(len, segment))), np.cumsum([len(batch) for batch in segment])[:-1])
    own_places = [int(place) for batch in places[world.rank :: world.size] for place in batch]
    logits = gather_rows(own_places, torch.cat(shard), sum(map(len, segment)), world=world)
    if not np.isfinite(logits).all():
        raise RunError("the model returned logits that are not finite: its weights are unusable")
    return logits


def _keep(partial: PartialLogits | None, number: int, *, logits: NDArray[np.float64], world: World) -> None:
    """Keep the logits of a segment for the next attempt. Collective."""

    def write() -> None:
        if partial is not None:
            partial.write(number, logits)

    try:
        write_on_ranks(write, partial.folder if partial is not None else Path(), world, main_only=True)
    except OSError as problem:
        raise RunError(f"the predictions could not be kept for the next attempt: {problem}") from None
