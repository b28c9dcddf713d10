"""The variants of the ablation: what typical scripts do differently, one thing at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ...data.sampler import resolve_train_batch_size
from ...settings import Settings

PADDED_RANKS = 8  # a node of GPUs; the share of repeated rows grows with the number of ranks
AVERAGING_INTERVALS = (1, 10)  # steps

Optimizer = Literal["AdamW", "Adam", "SGD, not clipped", "SGD with momentum, not clipped", "Adam, not clipped"]
# Averaging parameters is compared without clipping: a rank can clip only its own gradients then, which is another
# difference.
NOT_CLIPPED: tuple[Optimizer, ...] = ("SGD, not clipped", "SGD with momentum, not clipped", "Adam, not clipped")


@dataclass(frozen=True)
class Variant:
    """How a model is trained. The defaults are this project's; a variant differs from its baseline in one field."""

    split: Literal["scikit-learn, stratified", "datasets, not stratified"] = "scikit-learn, stratified"
    rows: Literal["divided", "same order in each epoch", "same on each rank", "own split of each rank"] = "divided"
    inflation: int = 1  # factor on loss and gradients
    optimizer: Optimizer = "AdamW"  # with decay and schedule; all others with neither
    averaging_interval: int = 0  # steps between averages of parameters; 0: gradients are averaged, in each step
    padding: Literal["longest", "max_length"] = "longest"
    batch_factor: int = 1  # factor on the number of ranks, each with as many rows as before
    counted_ranks: int = 1  # ranks among which `DistributedSampler` divides the test rows, repeating some of them
    counts_rank_0_only: bool = False  # its correct predictions, divided by the number of all test rows
    dropout_seed: int = 0  # added to the seed of the dropout masks

    @property
    def training(self) -> Variant:
        """The variant whose training has the same result: counting test rows differently needs no training."""
        return replace(self, counted_ranks=1, counts_rank_0_only=False)


BASELINE = Variant()


@dataclass(frozen=True)
class Change:
    """A row of the table: a variant, and the baseline from which it differs in one thing."""

    name: str
    variant: Variant
    baseline: Variant = BASELINE


def name_baseline(baseline: Variant) -> str:
    """Return the name of a baseline in the table."""
    if baseline == BASELINE:
        return "this project's training"
    optimizer, _, clipping = baseline.optimizer.partition(", ")
    return f"{optimizer}, without decay or schedule, {clipping}, gradients averaged"


def build_changes(ranks: int, accumulation_steps: int, epochs: int) -> tuple[list[Change], dict[str, str]]:
    """Return the changes, and the names of those without effect with these settings, each with the reason.

    Changes with the same baseline are neighbors. The first one is the control: it should have no systematic effect.
    """
    factor = ranks * accumulation_steps if ranks * accumulation_steps > 1 else 2
    changes = [
        Change("only another dropout seed (control)", Variant(dropout_seed=1_000)),
        Change(
            "split by `datasets`, not stratified, instead of scikit-learn", Variant(split="datasets, not stratified")
        ),
        Change(
            f"test rows padded to {PADDED_RANKS} equal shards by `DistributedSampler`, repeated rows counted",
            Variant(counted_ranks=PADDED_RANKS),
        ),
        Change(f"loss and gradients inflated by Trainer, x {factor}", Variant(inflation=factor)),
        Change("Adam without decay or schedule instead of AdamW with both", Variant(optimizer="Adam")),
        Change("every review padded to the maximum length", Variant(padding="max_length")),
        Change(f"batch size per rank, {2 * ranks} ranks instead of {ranks}", Variant(batch_factor=2)),
        Change("`set_epoch` forgotten: the same order in each epoch", Variant(rows="same order in each epoch")),
    ]
    between_ranks = [
        Change(f"no sampler: the same rows on each of {ranks} ranks", Variant(rows="same on each rank")),
        Change("an unseeded split: each rank has its own test rows", Variant(rows="own split of each rank")),
        Change(
            f"correct rows of one of {ranks} ranks divided by all rows, no `all_reduce`",
            Variant(counts_rank_0_only=True),
        ),
    ]
    for optimizer in NOT_CLIPPED:
        baseline, short = Variant(optimizer=optimizer), optimizer.removesuffix(", not clipped")
        for interval in AVERAGING_INTERVALS:
            when = "after each step" if interval == 1 else f"every {interval} steps"
            between_ranks.append(
                Change(
                    f"{short}: parameters averaged {when} instead of gradients",
                    replace(baseline, averaging_interval=interval),
                    baseline,
                )
            )
    left_out = {}
    if epochs < 2:
        left_out[changes.pop().name] = "it has no effect in 1 epoch: train for 2 or more"
    if ranks == 1:
        left_out |= {change.name: "it has no effect with 1 rank: use --nproc_per_node 2" for change in between_ranks}
    else:
        changes += between_ranks
    return changes, left_out


def variant_settings(settings: Settings, variant: Variant, ranks: int) -> Settings:
    """Return the settings of a variant: one process works for all ranks, of which a variant may have more."""
    if variant.optimizer != "AdamW":  # AdamW without decay is Adam
        settings = replace(settings, weight_decay=0.0, lr_scheduler_type="constant")
    if variant.optimizer in NOT_CLIPPED:
        settings = replace(settings, max_grad_norm=0.0)
    return replace(
        settings,
        logical_ranks=ranks * variant.batch_factor,
        train_batch_size=resolve_train_batch_size(settings, ranks) * variant.batch_factor,
        per_device_train_batch_size=None,
    )
