"""Why two runs differ: the recorded settings and versions that explain it, and how to start two runs that are equal."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..common.errors import shorten
from ..common.formats import flatten
from ..common.machine import KERNELS_FROM_ENVIRONMENT
from ..model.identity import changed_keys
from ..runs.reader import Run
from ..runs.setting_effects import AFTER_THE_STEPS, BEST_WEIGHTS, FORMER, OUTPUT, STATED_ELSEWHERE, WITHOUT_EFFECT
from ..setting_groups import BUILT_IN, DataSettings, ModelSettings
from ..settings import Settings

# The keys of settings.json that do not describe the training.
NO_SETTINGS = {"path", "launchers", *OUTPUT, *FORMER}
NEVER_A_CAUSE = {*NO_SETTINGS, "wrapper", *STATED_ELSEWHERE, *WITHOUT_EFFECT}
NAMES = {"world_size": "ranks", "logical_ranks": "logical ranks", "git_commit": "commit of this program"}
NAMES |= {"model_commit": "commit of the model", "kernels.cpu": "CPU"}
# What the files of a local model determine, besides the weights. A commit on the Hub determines all of it.
MODEL_CONTENT = {"model_config": "the model's config", "model_code_sha256": "the model's Python code"}
MODEL_CONTENT |= {"tokens_sha256": "tokens"}
# They affect that content too, or choose another model.
OF_MODEL_CONTENT = {f.name for group in (DataSettings, ModelSettings) for f in fields(group)} | {"seed", "model_commit"}
FIRST = ("world_size", "logical_ranks", "threads", "devices")  # in the order in which a reader asks about them
LISTED = 8  # differences in one line
IDENTICAL = "bitwise identical: every loss, gradient norm, prediction and weight"
FLAGS = {f.name for f in fields(Settings)}
# How to remove a difference, by its key: the first pattern that matches counts.
REMEDIES = (
    ("|".join(FLAGS - {"logical_ranks"}), "with the same {}"),
    ("logical_ranks|world_size", "with the same number of ranks"),
    (r"versions\..*", "with the same versions of {}"),
    ("git_commit", "with the same commit of this program"),
    (r"devices|kernels\..*", "on the same hardware"),
    ("|".join(MODEL_CONTENT), "with the same files of the model"),
    (".*", "with the same {}"),
)
KERNEL_VARIABLES = tuple(f"kernels.{name}" for name in KERNELS_FROM_ENVIRONMENT)


@dataclass(frozen=True)
class Difference:
    """Something that both runs recorded, with different values."""

    key: str  # dotted, in settings.json
    values: tuple[Any, Any]

    def __str__(self) -> str:
        if self.key == "model_config":
            before, now = self.values
            changed = [str(Difference(name, (before.get(name), now.get(name)))) for name in changed_keys(before, now)]
            return f"{MODEL_CONTENT[self.key]}: {_limited(changed)}"
        if self.key in MODEL_CONTENT:
            return MODEL_CONTENT[self.key]
        package = self.key.removeprefix("versions.")
        values = " and ".join(
            "not set" if value is None else shorten(value, 12 if self.key.endswith("commit") else 40)
            for value in self.values
        )
        return f"{NAMES.get(self.key, package)} {values}"


def explain(a: Run, b: Run, first_difference: str) -> str:
    """Return, in one line, the recorded causes of a difference from `bitwise.first_difference`, and how to avoid it."""
    differences = find_causes(a, b, steps_differ=first_difference.startswith("step "))
    gpus = on_gpus_without_deterministic(a, b)
    if differences:
        return f"trained differently: {_limited(differences)}; start both {remedy(a, b, differences, gpus=bool(gpus))}"
    if gpus:
        return f"{gpus}; start both with --deterministic"
    hashes = {run.metrics.get("hash") for run in (a, b)}
    if len(hashes) == 1 and None not in hashes:
        return "both runs ended with the same hash, so a file of one of them was changed afterwards"
    return (
        "nothing that the runs recorded explains it: the settings that affect results, versions and machines are equal"
    )


def conclude(difference: str | None, explanation: str | None) -> str:
    """Return the line with which `app.compare` ends, from the results of `first_difference` and `explain`."""
    return IDENTICAL if difference is None else f"not equal: {difference}; {explanation}"


def find_causes(a: Run, b: Run, steps_differ: bool) -> list[Difference]:
    """Return the recorded differences that may explain different results.

    Every key of settings.json counts unless it is known to have no effect, so that a new setting is never left out.
    Keys that only one of the runs recorded, because the other one is older, are unknown and do not count. If a loss or
    gradient norm differs, no setting of the evaluation explains it.
    """
    flat_a, flat_b = (_comparable(run) for run in (a, b))
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
    keys = [key for key in dict.fromkeys((*FIRST, *flat_a)) if key in flat_a.keys() & flat_b.keys() - without_effect]
    causes = [Difference(key, (flat_a[key], flat_b[key])) for key in keys if flat_a[key] != flat_b[key]]
    commit_only = [cause for cause in causes if cause.key == "git_commit"]
    is_content_known = _recorded_folder_content(a) and _recorded_folder_content(b)
    path_only = [cause for cause in causes if cause.key == "model" and is_content_known]
    others = [cause for cause in causes if cause not in commit_only and cause not in path_only]
    contents = _differences_in_model_content(a, b)
    content_settings = {cause.key for cause in others} & OF_MODEL_CONTENT
    if not content_settings:
        others += contents
    elif "dropout" not in content_settings and any(content.key == "model_config" for content in contents):
        others += path_only  # of the settings, only dropout changes the config: it is another model
    # A model's path is suspected only if nothing else differs: equal content may have other weights, which are not
    # recorded. So is another commit of this program, which is meant not to change results.
    return others or path_only or commit_only


def remedy(a: Run, b: Run, differences: Sequence[Difference], *, gpus: bool) -> str:
    """Return how to start both runs so that they are equal, to be read after "start both".

    `gpus` tells whether they used GPUs without `--deterministic`.
    """
    values = {difference.key: difference.values for difference in differences}
    exact = []
    if values.keys() & {"logical_ranks", "world_size"}:
        n = max(values.get("logical_ranks", (0,)))
        sizes = [run.settings["world_size"] for run in (a, b)]
        is_possible = n > 0 and not n & (n - 1) and all(size > 0 and n % size == 0 for size in sizes)
        if is_possible and not _depends_on_ranks(a, b):
            exact.append(f"--logical_ranks {n}")
            values = {key: pair for key, pair in values.items() if key not in ("logical_ranks", "world_size")}
    if "threads" in values:
        exact.append(f"--threads {min(values.pop('threads'))}")
    if gpus and "deterministic" not in values:
        exact.append("--deterministic")
    if "model_commit" in values:
        exact.append(f"--revision {shlex.quote(str(values.pop('model_commit')[0]))}")
    parts = [f"with {' '.join(exact)}"] if exact else []
    for pattern, phrase in REMEDIES:
        keys = [key for key in values if re.fullmatch(pattern, key)]
        names = [f"--{key}" if key in FLAGS else key.removeprefix("versions.") for key in keys]
        parts += [phrase.format(_listed(names))] if keys else []
        values = {key: pair for key, pair in values.items() if key not in keys}
    return ", ".join(parts)


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


def _differences_in_model_content(a: Run, b: Run) -> list[Difference]:
    """Return the differences in the files of a local model. Runs that did not record it explain nothing."""
    if a.settings.get("model_commit") is not None or b.settings.get("model_commit") is not None:
        return []
    differences = []
    for key in MODEL_CONTENT:
        x, y = (run.settings.get(key) for run in (a, b))
        if x is None or y is None:
            continue
        if changed_keys(x, y) if key == "model_config" else x != y:
            differences.append(Difference(key, (x, y)))
    return differences


def _recorded_folder_content(run: Run) -> bool:
    """Return whether the model was a local folder whose content the run recorded."""
    is_folder = run.settings.get("model") not in BUILT_IN and run.settings.get("model_commit") is None
    return is_folder and None not in (run.settings.get("model_config"), run.settings.get("tokens_sha256"))


def _comparable(run: Run) -> dict[str, Any]:
    """Return the record of a run, flat; each kind of device once, because the number of ranks is an entry itself."""
    # None is a value of a setting, such as "no dropout of its own". Elsewhere it means that the value is unknown.
    flat = {
        key: value
        for key, value in flat_settings({k: v for k, v in run.settings.items() if k not in MODEL_CONTENT}).items()
        if value is not None or (key in FLAGS and key != "threads") or key in ("model_commit", *KERNEL_VARIABLES)
    }
    flat["logical_ranks"] = flat.get("logical_ranks") or run.settings["world_size"]
    if devices := run.settings.get("devices"):
        flat["devices"] = ", ".join(sorted(set(devices)))
    return flat


def _used_gpus(run: Run) -> bool:
    return not all(device.startswith("cpu") for device in run.settings.get("devices") or [])


def _depends_on_ranks(*runs: Run) -> bool:
    """Return whether a run added its gradients in an order that depends on the number of ranks itself."""
    settings = [run.settings for run in runs]
    return any(s.get("deepspeed_config") or s.get("ddp_comm_hook") == "power_sgd" for s in settings)


def _limited(things: Sequence[Any]) -> str:
    more = f" and {len(things) - LISTED} more" if len(things) > LISTED else ""
    return ", ".join(map(str, things[:LISTED])) + more


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
