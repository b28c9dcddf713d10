"""Why two runs differ: the recorded settings and versions that affect results, and the flags that make runs equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from ..common.errors import shorten
from ..model import identity
from ..runs.reader import Run
from ..runs.setting_effects import BEST_WEIGHTS, OUTPUT, WITHOUT_EFFECT

# The keys of settings.json that do not describe the training, and a setting of earlier versions: `bf16` is true if
# `precision`, beside it, is "bf16".
NO_SETTINGS = {"path", "launchers", "bf16", *OUTPUT}
NEVER_A_CAUSE = {*NO_SETTINGS, "wrapper", *WITHOUT_EFFECT}
NEVER_A_CAUSE |= {f"model_config.{name}" for name in identity.WITHOUT_EFFECT}
NAMES = {"world_size": "ranks", "logical_ranks": "logical ranks", "git_commit": "commit of this program"}
NAMES |= {"model_commit": "commit of the model", "kernels.cpu": "CPU", "tokens_sha256": "tokens"}
FIRST = ("world_size", "logical_ranks", "threads", "devices")  # in the order in which a reader asks about them
LISTED = 8  # differences in one line
IDENTICAL = "bitwise identical: every loss, gradient norm, prediction and weight"
UNKNOWN_IF_NONE = ("git_commit", "model_commit", "threads")  # elsewhere None is a value, such as no dropout of its own

Causes = dict[str, tuple[Any, Any]]  # the values of both runs, by their dotted key in settings.json


def explain(a: Run, b: Run, first_difference: str) -> str:
    """Return, in one line, the recorded causes of a difference from `bitwise.first_difference`, and how to avoid it."""
    if _used_deepspeed(a) or _used_deepspeed(b):
        return "equal within rounding at best, because DeepSpeed adds gradients in an order of its own"
    causes = find_causes(a, b, steps_differ=first_difference.startswith("step "))
    gpus = on_gpus_without_deterministic(a, b)
    flags = [*_flags_that_help(causes, a, b), *(["--deterministic"] if gpus else [])]
    remedy = f"; start both with {' '.join(flags)}" if flags else ""
    if causes:
        listed = [_describe(key, values) for key, values in causes.items()]
        more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
        return f"trained differently: {', '.join(listed[:LISTED])}{more}{remedy}"
    return gpus + remedy if gpus else "nothing that the runs recorded explains it"


def conclude(difference: str | None, explanation: str | None) -> str:
    """Return the line with which `app.compare` ends, from the results of `first_difference` and `explain`."""
    return IDENTICAL if difference is None else f"not equal: {difference}; {explanation}"


def find_causes(a: Run, b: Run, steps_differ: bool) -> Causes:
    """Return the recorded differences that may explain different results.

    Every key of settings.json counts unless it is known to have no effect, so that a new setting is never left out.
    Keys that only one of the runs recorded, because the other one is older, are unknown and do not count. If a loss or
    gradient norm differs, no setting of the evaluation explains it.
    """
    flat_a, flat_b = (_comparable(run.settings) for run in (a, b))
    without_effect = NEVER_A_CAUSE | {key for key in UNKNOWN_IF_NONE if None in (flat_a.get(key), flat_b.get(key))}
    if steps_differ:
        without_effect |= {"load_best_model_at_end", *BEST_WEIGHTS}
    if flat_a["logical_ranks"] == flat_b["logical_ranks"] and not _depends_on_ranks(a, b):
        without_effect |= {"world_size"}
    keys = [key for key in dict.fromkeys((*FIRST, *flat_a)) if key in flat_a.keys() & flat_b.keys() - without_effect]
    causes = {key: (flat_a[key], flat_b[key]) for key in keys if flat_a[key] != flat_b[key]}
    if len(causes) > 1:
        causes.pop("git_commit", None)  # another commit of this program is meant not to change results
    return causes


def on_gpus_without_deterministic(a: Run, b: Run) -> str | None:
    """Return the warning that GPUs were used without `--deterministic`, or None if that is not so."""
    if not any(_used_gpus(run) and not run.settings.get("deterministic") for run in (a, b)):
        return None
    return "GPUs were used without --deterministic, which may give different results each time"


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by dotted keys, with each list as one line."""
    flat = pd.json_normalize(dict(settings)).to_dict("records")[0]
    return {str(key): ", ".join(map(str, value)) if isinstance(value, list) else value for key, value in flat.items()}


def _comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a settings.json, flat, with each kind of device once, because the number of ranks is an entry itself."""
    kinds = ", ".join(sorted(set(settings.get("devices") or [])))
    ranks = settings.get("logical_ranks") or settings["world_size"]
    return flat_settings(settings) | {"logical_ranks": ranks, "devices": kinds}


def _describe(key: str, values: tuple[Any, Any]) -> str:
    length = 12 if key.endswith(("commit", "sha256")) else 40
    x, y = ("not set" if value is None else shorten(value, length) for value in values)
    return f"{NAMES.get(key, key.removeprefix('versions.'))} {x} and {y}"


def _flags_that_help(causes: Causes, a: Run, b: Run) -> list[str]:
    """Return the flags with which runs on these ranks are equal, as far as ranks and threads are the cause."""
    flags = []
    if causes.keys() & {"logical_ranks", "world_size"}:
        sizes = [run.settings["world_size"] for run in (a, b)]
        n = max(run.settings.get("logical_ranks") or size for run, size in zip((a, b), sizes, strict=True))
        is_power_of_two = n > 0 and not n & (n - 1)
        if is_power_of_two and all(size > 0 and n % size == 0 for size in sizes) and not _depends_on_ranks(a, b):
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
