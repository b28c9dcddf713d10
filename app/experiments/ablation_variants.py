"""The variants of the ablation: each has one silent difference between typical training scripts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..common.errors import UserError
from ..data.sampler import plan_batches, resolve_train_batch_size
from ..settings import Settings

PADDED_RANKS = 8  # a node of GPUs; the share of repeated rows grows with the number of ranks


@dataclass(frozen=True)
class Variant:
    """How a model is trained. The defaults are this project's; each variant of the ablation changes one of them.

    Attributes:
        split: the function that splits the rows.
        inflation: factor on loss and gradients.
        optimizer: AdamW with decay and schedule, or Adam with neither.
        padding: of a batch, to its longest review or to `--max_length`.
        batch_factor: factor on the number of ranks, each with as many rows as before.
        counted_ranks: number of ranks among which `DistributedSampler` divides the test rows, repeating some of them.
        dropout_seed: added to the seed of the dropout masks.
    """

    split: Literal["scikit-learn, stratified", "datasets, not stratified"] = "scikit-learn, stratified"
    inflation: int = 1
    optimizer: Literal["AdamW", "Adam"] = "AdamW"
    padding: Literal["longest", "max_length"] = "longest"
    batch_factor: int = 1
    counted_ranks: int = 1
    dropout_seed: int = 0


def build_variants(ranks: int, accumulation_steps: int) -> dict[str, Variant]:
    """Return the variants by name. The first one is the control: a change that should have no systematic effect."""
    factor = ranks * accumulation_steps if ranks * accumulation_steps > 1 else 2
    return {
        "only another dropout seed (control)": Variant(dropout_seed=1_000),
        "split by `datasets`, not stratified, instead of scikit-learn": Variant(split="datasets, not stratified"),
        f"test rows padded to {PADDED_RANKS} equal shards by `DistributedSampler`, repeated rows counted": Variant(
            counted_ranks=PADDED_RANKS
        ),
        f"loss and gradients inflated by Trainer, x {factor}": Variant(inflation=factor),
        "Adam without decay or schedule instead of AdamW with both": Variant(optimizer="Adam"),
        "every review padded to the maximum length": Variant(padding="max_length"),
        f"batch size per rank, {2 * ranks} ranks instead of {ranks}": Variant(batch_factor=2),
    }


def variant_settings(settings: Settings, variant: Variant, ranks: int) -> Settings:
    """Return the settings of a variant: one process works for all ranks, of which a variant may have more."""
    return replace(
        settings,
        logical_ranks=ranks * variant.batch_factor,
        train_batch_size=resolve_train_batch_size(settings, ranks) * variant.batch_factor,
        per_device_train_batch_size=None,
    )


def check_batches(settings: Settings, n_train: int, ranks: int) -> None:
    """Check that every variant can be trained, before any of them is.

    Raises:
        UserError: names the variant that cannot be trained.
    """
    for name, variant in build_variants(ranks, settings.gradient_accumulation_steps).items():
        try:
            plan_batches(variant_settings(settings, variant, ranks), n_train, world_size=1)
        except UserError as problem:
            raise UserError(f"{name}: {problem}") from None
