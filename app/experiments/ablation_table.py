"""The effect of each variant of the ablation, over seeds, and the table that shows it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..report.environments import markdown_environment
from ..report.statistics import paired_seeds
from .ablation_variants import Variant


@dataclass(frozen=True)
class Outcome:
    """The result of one training.

    Attributes:
        losses: the loss of each step, as the script would log it.
        correct: bool (n_test,), whether each test row was classified correctly, in file order.
    """

    losses: list[float]
    correct: NDArray[np.bool_]


def measure_effect(pairs: list[tuple[Outcome, Outcome]], variant: Variant) -> dict[str, Any]:
    """Compare a variant with the baseline, seed by seed.

    Args:
        pairs: for each seed, the baseline's outcome and the variant's.
        variant: what was changed.

    Returns:
        An entry of `differences` in ablation.json. Its accuracies are computed as in typical scripts: the number of
        correct predictions, in which some rows may count twice, divided by the number of test rows.
    """
    n_test = len(pairs[0][0].correct)
    changed = [float(b.correct.sum() / n_test) for _, b in pairs]
    baseline = [float(a.correct.mean()) for a, _ in pairs]
    gaps = [np.abs(np.subtract(*_common_steps(a.losses, b.losses))) for a, b in pairs]
    same_rows = variant.split == Variant().split and variant.counted_ranks == 1
    statistics = paired_seeds(changed, baseline)
    interval = statistics.difference
    return {
        "recipe": asdict(variant),
        "first_differing_steps": [int(gap.nonzero()[0][0]) + 1 if gap.any() else None for gap in gaps],
        "mean_loss_difference": _finite(np.mean([gap.mean() for gap in gaps])),
        "max_loss_difference": _finite(np.max([gap.max() for gap in gaps])),
        "accuracies": changed,
        "accuracy_difference": statistics.mean_a - statistics.mean_b,
        "interval": [interval.low, interval.high] if interval else None,
        "p_value": statistics.p_value,
        "changed_rows": float(np.mean([(a.correct != b.correct).sum() for a, b in pairs])) if same_rows else None,
        "counted_rows": len(pairs[0][1].correct),
    }


def _common_steps(a: list[float], b: list[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    steps = min(len(a), len(b))
    return np.asarray(a[:steps]), np.asarray(b[:steps])


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def as_markdown(ablation: dict[str, Any]) -> str:
    """Render the content of ablation.json as a Markdown table."""
    return markdown_environment().get_template("ablation.md.j2").render(ablation=ablation)
