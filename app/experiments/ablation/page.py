"""Train all variants over several seeds, and write the table of their effects."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ...common.errors import UserError, escape_control_characters
from ...common.files import write_json, write_text
from ...common.formats import render_template
from ...common.terminal import hides_progress
from ...data.sampler import plan_batches
from ...distributed.environment import check_environment
from ...distributed.process_group import join
from ...distributed.world import World
from ...model.hub import resolve_commit
from ...report.statistics import paired
from ...runs.folder import create_folder
from ...runs.schema import RUNS
from ...settings import Settings
from ...training.build import read_and_split
from ...training.console import quiet_libraries
from .rows import build_variant_data, count_rows
from .training import EARLY, Outcome, train_variant
from .variants import BASELINE, Change, Variant, build_changes, name_baseline, variant_settings


@dataclass(frozen=True)
class Pair:
    """The outcomes of a baseline and of a change, with the same seed. The weights are removed."""

    baseline: Outcome
    changed: Outcome  # with the test rows that the variant counts
    early: float | None  # relative difference of the weights after `EARLY` steps
    end: float | None  # the same at the end; None if the weights cannot be compared


def run_ablation(settings: Settings, ranks: int, seeds: int) -> int:
    """Train every variant, and print and write the table; return the exit status."""
    check_environment()
    _, split, plan = read_and_split(settings, ranks)
    changes, left_out = build_changes(ranks, settings.gradient_accumulation_steps, plan.epochs)
    for change in changes:
        try:
            plan_batches(variant_settings(settings, change.variant, ranks), len(split.train), world_size=1)
        except UserError as problem:
            raise UserError(f"{change.name}: {problem}") from None
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")
    folder = create_folder(settings.output_dir, RUNS / "ablations")
    ablation = ablate(settings, ranks, seeds, changes=changes) | {"left_out": left_out}
    markdown = render_template("ablation.md.j2", ablation=ablation)
    write_json(folder / "ablation.json", ablation)
    write_text(folder / "ablation.md", markdown)
    print(f"\n{markdown}")
    print(f"written to {escape_control_characters(str(folder))}/: ablation.md, ablation.json")
    return 0


def ablate(settings: Settings, ranks: int, seeds: int, *, changes: list[Change]) -> dict[str, Any]:
    """Return the content of ablation.json: the effect of each change on step losses, weights and accuracy.

    The settings are the baseline's, with the first seed. The ranks, a power of two, are simulated.
    """
    settings = replace(settings, revision=resolve_commit(settings))  # every training starts from the same commit
    pairs: dict[str, list[Pair]] = {change.name: [] for change in changes}
    total = seeds * (len(changes) + len({change.baseline for change in changes}))
    is_hidden = hides_progress(settings.disable_tqdm)
    with join(settings) as world, tqdm(total=total, unit=" runs", disable=is_hidden) as progress:
        quiet_libraries(world)
        for seed in range(settings.seed, settings.seed + seeds):
            for name, pair in train_pairs(replace(settings, seed=seed), changes, ranks, world=world, progress=progress):
                pairs[name].append(pair)
    baselines = {
        name_baseline(change.baseline): {
            "recipe": asdict(change.baseline),
            "accuracies": [float(pair.baseline.correct.mean()) for pair in pairs[change.name]],
        }
        for change in changes
    }
    return {
        "settings": settings.as_dict() | {"csv": str(settings.csv_path)},
        "ranks": ranks,
        "seeds": list(range(settings.seed, settings.seed + seeds)),
        "n_test": len(next(iter(pairs.values()))[0].baseline.correct),
        "early_step": EARLY,
        "baseline": {"accuracies": baselines[name_baseline(BASELINE)]["accuracies"]},
        "baselines": baselines,
        "differences": [
            {"name": change.name, "baseline": name_baseline(change.baseline)}
            | measure_effect(pairs[change.name], change.variant)
            for change in changes
        ],
    }


def train_pairs(
    settings: Settings, changes: list[Change], ranks: int, *, world: World, progress: Any
) -> Iterator[tuple[str, Pair]]:
    """Train each baseline and its variants with one seed. Only the outcome of one baseline is kept at a time."""

    def train(variant: Variant) -> Outcome:
        variant_data = data if variant.split == BASELINE.split else build_variant_data(settings, variant, world)
        outcome = train_variant(settings, variant, variant_data, ranks=ranks, world=world)
        gc.collect()  # DDP's modules are part of reference cycles, and each holds a complete model
        progress.update()
        return outcome

    data = build_variant_data(settings, BASELINE, world)
    for baseline, group in groupby(changes, key=lambda change: change.baseline):
        expected = train(baseline)
        for change in group:
            if change.variant.training == baseline:
                changed = expected
                progress.update()
            else:
                changed = train(change.variant)
            yield change.name, pair_outcomes(expected, changed, change.variant, ranks=ranks)


def pair_outcomes(baseline: Outcome, changed: Outcome, variant: Variant, *, ranks: int) -> Pair:
    """Compare the weights, and count the test rows as the variant does."""
    counted = replace(changed, correct=count_rows(changed.correct, variant, ranks))
    return Pair(
        replace(baseline, early_weights=None, weights=None),
        replace(counted, early_weights=None, weights=None),
        early=relative_difference(baseline.early_weights, changed.early_weights),
        end=relative_difference(baseline.weights, changed.weights),
    )


def relative_difference(a: torch.Tensor | None, b: torch.Tensor | None) -> float | None:
    """Return the norm of the difference divided by the norm of the baseline `a`, in fp64. None: not comparable."""
    if a is None or b is None or a.shape != b.shape:  # another split may have another vocabulary
        return None
    reference = a.double()
    return float((reference - b).norm() / reference.norm())


def measure_effect(pairs: list[Pair], variant: Variant) -> dict[str, Any]:
    """Return an entry of `differences` in ablation.json, from the pair of each seed.

    The accuracies are computed as in typical scripts: the number of correct predictions, in which some rows may count
    twice or not at all, divided by the number of test rows.
    """
    n_test = len(pairs[0].baseline.correct)
    changed = [float(pair.changed.correct.sum() / n_test) for pair in pairs]
    gaps = [
        np.abs([x - y for x, y in zip(pair.baseline.losses, pair.changed.losses, strict=False)])  # of common steps
        for pair in pairs
    ]
    mean_gap, max_gap = float(np.mean([gap.mean() for gap in gaps])), float(np.max([gap.max() for gap in gaps]))
    same_rows = variant.split == BASELINE.split and variant == variant.training
    statistics = paired(changed, [float(pair.baseline.correct.mean()) for pair in pairs])
    interval = statistics.difference
    changed_rows = [(pair.baseline.correct != pair.changed.correct).sum() for pair in pairs] if same_rows else None
    return {
        "recipe": asdict(variant),
        "first_differing_steps": [int(gap.nonzero()[0][0]) + 1 if gap.any() else None for gap in gaps],
        "mean_loss_difference": mean_gap if math.isfinite(mean_gap) else None,
        "max_loss_difference": max_gap if math.isfinite(max_gap) else None,
        "early_weight_difference": _largest([pair.early for pair in pairs]),
        "final_weight_difference": _largest([pair.end for pair in pairs]),
        "accuracies": changed,
        "accuracy_difference": statistics.mean_a - statistics.mean_b,
        "interval": [interval.low, interval.high] if interval else None,
        "p_value": statistics.p_value,
        "changed_rows": float(np.mean(changed_rows)) if changed_rows else None,
        "counted_rows": len(pairs[0].changed.correct),
        "trained_test_rows": float(np.mean([pair.changed.trained_test_rows for pair in pairs])),
    }


def _largest(differences: list[float | None]) -> float | None:
    """Return the largest difference; None if any is unknown or not finite."""
    known = [difference for difference in differences if difference is not None and math.isfinite(difference)]
    return max(known) if len(known) == len(differences) else None
