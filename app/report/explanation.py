"""Why two runs differ: the recorded settings and versions that affect results, and the flags that make runs equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint.resume import BEST_WEIGHTS, OUTPUT, WITHOUT_EFFECT
from ..common.errors import shorten
from ..equality import differing_entries
from ..model import identity
from ..runs.reader import Run

# The keys of settings.json that do not describe the training, and a setting of earlier versions: `bf16` is true if
# `precision`, beside it, is "bf16".
NO_SETTINGS = {"path", "launchers", "command", "date", "bf16", *OUTPUT}
NEVER_A_CAUSE = {"wrapper", *WITHOUT_EFFECT, *(f"model_config.{name}" for name in identity.WITHOUT_EFFECT)}
NAMES = {
    "world_size": "ranks",
    "logical_ranks": "logical ranks",
    "git_commit": "commit of this program",
    "model_commit": "commit of the model",
    "kernels.cpu": "CPU",
    "tokens_sha256": "tokens",
}
FIRST = ("world_size", "logical_ranks", "threads", "devices")  # in the order in which a reader asks about them
IDENTICAL = "bitwise identical: every loss, gradient norm, prediction and weight"
UNKNOWN_IF_NONE = ("git_commit", "model_commit", "threads")  # elsewhere None is a value, such as no dropout of its own

Differences = dict[str, tuple[Any, Any]]  # the values of both runs, by their dotted key in settings.json


def explain(a: Run, b: Run, first_difference: str) -> str:
    """Return, in one line, the recorded causes of a difference from `bitwise.first_difference`, and how to avoid it."""
    if _used_deepspeed(a) or _used_deepspeed(b):
        return "equal within rounding at best, because DeepSpeed adds gradients in an order of its own"
    causes = find_causes(a, b, steps_differ=first_difference.startswith("step "))
    flags = _flags_that_help(causes, a, b)
    reasons = [_describe(key, values) for key, values in causes.items()]
    if any(_used_gpus(run) and not run.settings.get("deterministic") for run in (a, b)):
        reasons.append("GPUs were used without --deterministic, which may give different results each time")
        flags.append("--deterministic")
    if not reasons:
        return "nothing that the runs recorded explains it"
    return f"trained differently: {', '.join(reasons)}" + (f"; start both with {' '.join(flags)}" if flags else "")


def conclude(difference: str | None, explanation: str | None) -> str:
    """Return the line with which `app.compare` ends, from the results of `first_difference` and `explain`."""
    return IDENTICAL if difference is None else f"not equal: {difference}; {explanation}"


def find_causes(a: Run, b: Run, steps_differ: bool) -> Differences:
    """Return the recorded differences that may explain different results.

    Every key of settings.json counts unless it is known to have no effect, so that a new setting is never left out.
    If a loss or gradient norm differs, no setting of the evaluation explains it.
    """
    differences = differing_settings(*(_comparable(run.settings) for run in (a, b)))
    without_effect = NEVER_A_CAUSE | {key for key in UNKNOWN_IF_NONE if None in differences.get(key, ())}
    if steps_differ:
        without_effect |= {"load_best_model_at_end", *BEST_WEIGHTS}
    if "logical_ranks" not in differences and not _depends_on_ranks(a, b):
        without_effect |= {"world_size"}
    return {key: values for key, values in differences.items() if key not in without_effect}


def differing_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> Differences:
    """Return the entries of two settings.json that describe the training and differ."""
    found = differing_entries(a, b)
    return {key: found[key] for key in dict.fromkeys((*FIRST, *found)) if key in found.keys() - NO_SETTINGS}


def _comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a settings.json with each kind of device once, because the number of ranks is an entry itself."""
    ranks = settings.get("logical_ranks") or settings["world_size"]
    return settings | {"logical_ranks": ranks, "devices": sorted(set(settings.get("devices") or []))}


def _describe(key: str, values: tuple[Any, Any]) -> str:
    texts = (", ".join(map(str, value)) if isinstance(value, list) else value for value in values)
    x, y = ("not set" if text is None else shorten(text, 40) for text in texts)
    return f"{NAMES.get(key, key.removeprefix('versions.'))} {x} and {y}"


def _flags_that_help(causes: Differences, a: Run, b: Run) -> list[str]:
    """Return the flags with which runs on these ranks are equal, as far as ranks and threads are the cause."""
    flags = []
    if causes.keys() & {"logical_ranks", "world_size"} and not _depends_on_ranks(a, b):
        sizes = [run.settings["world_size"] for run in (a, b)]
        n = max(run.settings.get("logical_ranks") or size for run, size in zip((a, b), sizes, strict=True))
        if n.bit_count() == 1 and all(n % size == 0 for size in sizes):  # a power of two
            flags.append(f"--logical_ranks {n}")
    if "threads" in causes:
        flags.append(f"--threads {min(causes['threads'])}")
    return flags


def _used_gpus(run: Run) -> bool:
    return not all(device.startswith("cpu") for device in run.settings.get("devices") or [])


def _depends_on_ranks(*runs: Run) -> bool:
    """Return whether a run added its gradients in an order that depends on the number of ranks itself."""
    return any(_used_deepspeed(run) or run.settings.get("ddp_comm_hook") == "power_sgd" for run in runs)


def _used_deepspeed(run: Run) -> bool:
    return run.settings.get("wrapper") == "DeepSpeedEngine"
