"""Predict steps on a cluster of up to 1,024 ranks, from the time of one rank's step without exchanges.

The backward pass makes buckets of gradients ready one after another, and each is exchanged while the next is computed
(Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2).
docs/scaling.md#a-cluster explains what is assumed.
"""

from __future__ import annotations

from itertools import pairwise

import pandas as pd

from ..plan.memory import BUCKET_CAP
from ..plan.traffic import FIRST_BUCKET_CAP
from .core import Page, format_seconds

LARGEST_CLUSTER = 1024  # ranks
# The backward pass computes two matrix products for each one of the forward pass: Kaplan et al., "Scaling Laws for
# Neural Language Models", 2020, section 2.1.
FORWARD_SHARE = 1 / 3
GRADIENT_BYTES = 4  # of a parameter's gradient: fp32, also in mixed precision


def ring_all_reduce(ranks: int, size: float, *, alpha: float, beta: float) -> float:
    """Return the seconds of an all-reduce, in which a message of n bytes takes alpha + beta * n seconds.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69, 2009.
    gloo's default, and NCCL's for large tensors. The time of the additions is left out.
    """
    return 2 * (ranks - 1) * (alpha + size / ranks * beta)


def bucket_sizes(parameters: float) -> list[int]:
    """Return the bytes of DDP's buckets, if each of them is filled up to its limit."""
    total = int(GRADIENT_BYTES * parameters)
    ends = [0, *range(FIRST_BUCKET_CAP, total, BUCKET_CAP), total]
    return [end - start for start, end in pairwise(ends)]


def predict_step(seconds: float, parameters: float, ranks: int, *, alpha: float, beta: float) -> float:
    """Return the seconds of a step on several ranks, each of which computes for `seconds`."""
    buckets, ready, end = bucket_sizes(parameters), FORWARD_SHARE * seconds, 0.0
    for size in buckets:  # they are ready at a constant rate over the backward pass
        ready += (1 - FORWARD_SHARE) * seconds * size / sum(buckets)
        end = max(ready, end) + ring_all_reduce(ranks, size, alpha=alpha, beta=beta)  # one exchange after another
    return end


def show_cluster(page: Page, seconds: float, parameters: float, *, alpha: float, beta: float) -> None:
    """Predict weak scaling: every rank has as many rows as the one whose step takes `seconds`."""
    about = (
        f"Predicted, not measured: a rank computes for {format_seconds(seconds)}. Gradients of {parameters:,.0f} "
        f"parameters are exchanged in {len(bucket_sizes(parameters))} bucket(s), in rings whose messages take "
        f"{format_seconds(alpha)} each, and a second for {1e-9 / beta:.3g} GB."
    )
    page.section("cluster", "A cluster", about)
    sizes = [1 << exponent for exponent in range(LARGEST_CLUSTER.bit_length())]
    steps = pd.Series({n: predict_step(seconds, parameters, n, alpha=alpha, beta=beta) for n in sizes})
    efficiency = seconds / steps
    page.chart("Weak scaling on a cluster", efficiency.to_frame("ring").rename_axis("ranks"), "efficiency")
    shown = {"step": steps.map(format_seconds), "efficiency": efficiency.map("{:.0%}".format)}
    page.table("Weak scaling", pd.DataFrame(shown).rename_axis("ranks"))
    page.numbers["step"] = steps.to_dict()
