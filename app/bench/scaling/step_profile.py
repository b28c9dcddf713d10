"""The computation of a step that is not measured here, such as a GPU's: from its time, or from a profile of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, variance

from ...common.errors import UserError
from ...plan.memory import BUCKET_CAP
from ...plan.traffic import FIRST_BUCKET_CAP
from ...profiling.breakdown import CATEGORIES, EXPOSED
from ...runs.parse import parse_object
from ...runs.schema import PROFILE, PROFILE_SUMMARY, SETTINGS
from ..charts import format_seconds
from .cluster import LinearComputation
from .cluster_section import ClusterFlags, ClusterInput, Scenario, describe_hop

# The backward pass computes two matrix products for each one of the forward pass: Kaplan et al., "Scaling Laws for
# Neural Language Models", 2020, section 2.1.
FORWARD_SHARE = 1 / 3
GRADIENT_BYTES = 4  # of a parameter's gradient: fp32, also in mixed precision


@dataclass(frozen=True)
class StepProfile:
    """The mean time of a rank's step without exchanges, in seconds."""

    rows: int  # of the rank in the step
    forward: float  # until the forward pass has ended
    backward: float
    update: float  # and all else that does not depend on the rows
    variation: float  # coefficient of variation of the ranks' times in the same step
    source: str  # the flag

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.update


def from_step_time(milliseconds: float, rows: int) -> StepProfile:
    """Divide the time of a step into a forward and a backward pass."""
    seconds = milliseconds / 1000
    forward = FORWARD_SHARE * seconds
    return StepProfile(rows, forward, seconds - forward, 0.0, 0.0, f"--step_ms {milliseconds:g}")


def read_profile(run: Path) -> StepProfile:
    """Read the times of a run that was started with `--profile N`. What they contain of communication is left out.

    Raises:
        UserError: the run has no profile, or its files are damaged.
    """
    path, settings_path = run / PROFILE / PROFILE_SUMMARY, run / SETTINGS.name
    try:
        text, settings_text = path.read_text(encoding="utf-8"), settings_path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        hint = "it has to be the folder of a run that was started with --profile N"
        raise UserError(f"--profile {run}: {problem}: {hint}") from None
    settings = parse_object(settings_text, str(settings_path), SETTINGS)
    try:
        ranks = [
            [{name: float(step[name]) / 1000 for name in CATEGORIES} for step in steps]
            for steps in json.loads(text)["ranks"]
        ]
        seconds = [[sum(step.values()) - step[EXPOSED] for step in steps] for steps in ranks]
        mean = {name: fmean(step[name] for steps in ranks for step in steps) for name in CATEGORIES}
        rows = settings["train_batch_size"] // settings["world_size"]
        variation = variation_among_ranks(seconds)
        forward = mean["data wait"] + mean["forward"]
        update = mean["optimizer"] + mean["other"]
        profile = StepProfile(rows, forward, mean["backward"], update, variation, f"--profile {run}")
        if not (0 < profile.seconds < math.inf and min(forward, mean["backward"], update) >= 0 and rows > 0):
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
        raise UserError(f"{path}: damaged, or of a version that wrote other keys") from None
    return profile


def variation_among_ranks(seconds: Sequence[Sequence[float]]) -> float:
    """Return the coefficient of variation of the times of the same step on several ranks; 0 for one rank.

    Differences between steps, such as of the length of rows, are not counted: all ranks share them.

    Args:
        seconds: for each rank, its steps.
    """
    if len(seconds) == 1:
        return 0.0
    relative = [variance(step) / fmean(step) ** 2 for step in zip(*seconds, strict=True)]
    return math.sqrt(fmean(relative))


def bucket_sizes(total: int) -> list[int]:
    """Return the bytes of DDP's buckets, if each of them is filled up to its limit."""
    ends = [0, *range(FIRST_BUCKET_CAP, total, BUCKET_CAP), total]
    return [end - start for start, end in pairwise(ends)]


def as_linear(profile: StepProfile, parameters: int) -> LinearComputation:
    """Assume that the backward pass computes gradients at a constant rate, and that only the update has no rows."""
    sizes = bucket_sizes(GRADIENT_BYTES * parameters)
    parts = [profile.backward * size / sum(sizes) for size in sizes]
    parts[0] += profile.forward
    per_row = [part / profile.rows for part in parts]
    return LinearComputation(tuple(sizes), (*[0.0] * len(sizes), profile.update), (*per_row, 0.0))


def profile_input(profile: StepProfile, parameters: int, flags: ClusterFlags) -> ClusterInput:
    """Return the input of a prediction in which nothing is measured on this machine."""
    computation = as_linear(profile, parameters)
    assert flags.node is not None
    assert flags.link is not None
    about = [
        f"Predicted, not measured, from {profile.source}: a step of {profile.rows} rows takes "
        f"{format_seconds(profile.seconds)} without exchanges, of which the forward pass takes "
        f"{format_seconds(profile.forward)} and the backward pass {format_seconds(profile.backward)}; both are "
        "proportional to the rows.",
        f"Gradients of {parameters:,} parameters with {GRADIENT_BYTES} bytes each are ready at a constant rate over "
        f"the backward pass, in {len(computation.sizes)} bucket(s) of 25 MiB, the first one of 1 MiB.",
        f"Nodes of {flags.ranks_per_node} ranks. Within a node: {describe_hop(flags.node)}. Between nodes, whose ranks "
        f"share one link: {describe_hop(flags.link)}. The flags --link_gbit, --link_latency_us, --node_gbit and "
        "--node_latency_us change them.",
    ]
    return ClusterInput(computation, [Scenario(1.0, flags.node, flags.link)], profile.rows, about)
