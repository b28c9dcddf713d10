"""Why two runs differ: the recorded settings and versions that affect results, and the flags that make runs equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..common.errors import shorten
from ..common.formats import flatten
from ..model import identity
from ..runs.reader import Run
from ..runs.setting_effects import AFTER_THE_STEPS, BEST_WEIGHTS, FORMER, OUTPUT, STATED_ELSEWHERE, WITHOUT_EFFECT
from ..settings import Settings

# The keys of settings.json that do not describe the training.
NO_SETTINGS = {"path", "launchers", *OUTPUT, *FORMER}
NEVER_A_CAUSE = {*NO_SETTINGS, "wrapper", *STATED_ELSEWHERE, *WITHOUT_EFFECT}
NEVER_A_CAUSE |= {f"model_config.{name}" for name in identity.WITHOUT_EFFECT}
NAMES = {"world_size": "ranks", "logical_ranks": "logical ranks", "git_commit": "commit of this program"}
NAMES |= {"model_commit": "commit of the model", "kernels.cpu": "CPU", "tokens_sha256": "tokens"}
FIRST = ("world_size", "logical_ranks", "threads", "devices")  # in the order in which a reader asks about them
LAST = ("model_config", "model_code_sha256", "tokens_sha256", "git_commit")  # what other causes may have changed, too
LISTED = 8  # differences in one line
IDENTICAL = "bitwise identical: every loss, gradient norm, prediction and weight"
# None is a value of a setting, such as "no dropout of its own", and of the variables in `kernels`. Elsewhere it means
# that the value is unknown, and a run always records its threads.
MAY_BE_NONE = {f.name for f in fields(Settings)} - {"threads"}

Causes = dict[str, tuple[Any, Any]]  # the values of both runs, by their dotted key in settings.json


def explain(a: Run, b: Run, first_difference: str) -> str:
    """Return, in one line, the recorded causes of a difference from `bitwise.first_difference`, and how to avoid it."""
    causes = find_causes(a, b, steps_differ=first_difference.startswith("step "))
    gpus = on_gpus_without_deterministic(a, b)
    flags = [*_flags_that_help(causes, a, b), *(["--deterministic"] if gpus else [])]
    remedy = f"; start both with {' '.join(flags)}" if flags else ""
    if causes:
        listed = [_describe(key, values) for key, values in causes.items()]
        more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
        return f"trained differently: {', '.join(listed[:LISTED])}{more}{remedy}"
    if gpus:
        return gpus + remedy
    hashes = {run.metrics.get("hash") for run in (a, b)}
    if len(hashes) == 1 and None not in hashes:
        return "both runs ended with the same hash, so a file of one of them was changed afterwards"
    return (
        "nothing that the runs recorded explains it: the settings that affect results, versions and machines are equal"
    )


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
    best_weights = flat_a.get("load_best_model_at_end") or flat_b.get("load_best_model_at_end")
    early_stopping = flat_a.get("early_stopping_patience") or flat_b.get("early_stopping_patience")
    rules = (
        (True, NEVER_A_CAUSE),
        (steps_differ, AFTER_THE_STEPS),
        (not early_stopping and (steps_differ or not best_weights), BEST_WEIGHTS),
        (not any(map(_used_gpus, (a, b))), ("deterministic", "cpu_offload")),
        (not _depends_on_ranks(a, b) and flat_a["logical_ranks"] == flat_b["logical_ranks"], ("world_size",)),
    )
    without_effect = {key for applies, keys in rules if applies for key in keys}
    keys = sorted(flat_a.keys() & flat_b.keys() - without_effect, key=_position)
    causes = {key: (flat_a[key], flat_b[key]) for key in keys if flat_a[key] != flat_b[key]}
    if len(causes) > 1:
        causes.pop("git_commit", None)  # another commit of this program is meant not to change results
    return causes


def on_gpus_without_deterministic(a: Run, b: Run) -> str | None:
    """Return the warning that GPUs were used without `--deterministic`, or None if that is not so."""
    affected = [run for run in (a, b) if _used_gpus(run) and not run.settings.get("deterministic")]
    if not affected:
        return None
    who = "these runs" if len(affected) == 2 else str(affected[0].folder)
    return f"{who} used GPUs without --deterministic, which may give different results each time"


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by dotted keys, with each list as one line."""
    flat = flatten(settings)
    return {key: ", ".join(map(str, value)) if isinstance(value, list) else value for key, value in flat.items()}


def _comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the known values of a settings.json; each kind of device once, because the ranks are an entry itself."""
    flat = {
        key: value
        for key, value in flat_settings(settings).items()
        if value is not None or key in MAY_BE_NONE or key.startswith("kernels.")
    }
    flat["logical_ranks"] = flat.get("logical_ranks") or settings["world_size"]
    if devices := settings.get("devices"):
        flat["devices"] = ", ".join(sorted(set(devices)))
    return flat


def _position(key: str) -> tuple[int, str]:
    name = key.partition(".")[0]
    if name in FIRST:
        return FIRST.index(name), key
    return len(FIRST) + (1 + LAST.index(name) if name in LAST else 0), key


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
    settings = [run.settings for run in runs]
    return any(s.get("deepspeed_config") or s.get("ddp_comm_hook") == "power_sgd" for s in settings)
