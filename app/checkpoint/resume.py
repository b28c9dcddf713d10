"""Where a run resumes, whether the checkpoint fits the requested training, and why the results would differ.

The first of these rules that applies decides:

1. torchrun has restarted this job: continue in the folder that its earlier processes wrote to.
2. No `--resume_from_checkpoint`: start a new run.
3. `--resume_from_checkpoint auto`: continue the run in `--output_dir`, or else the path's latest run unless it has
   finished. Without one, start a new run.
4. `--resume_from_checkpoint RUN`, without `--output_dir`: continue that run.
5. `--resume_from_checkpoint RUN/checkpoints/checkpoint-N`, or with `--output_dir`: start a new run from it.

A run is only ever continued from its latest checkpoint. Nothing of it is deleted: the lines of its logs after the
checkpoint are replaced when the first step of the resumed run is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from ..common.errors import AlreadyFinished, UserError
from ..common.machine import Arithmetic
from ..distributed.collectives import all_gather_object, broadcast_object, gather_arithmetic, raise_on_all_ranks
from ..distributed.environment import launcher_id
from ..distributed.world import World
from ..model.identity import changed_keys
from ..runs.folder import lock
from ..runs.schema import CHECKPOINTS, LATEST, LOGS, METRICS, RUN_STATE, RUNS, SETTINGS, STEPS
from ..setting_groups import OutputSettings
from ..settings import TYPES, Settings
from .manager import PREFIX, latest_first, problem_of

# They do not describe the training at all: names of folders, and settings of output and measurements.
OUTPUT = (*(setting.name for setting in fields(OutputSettings)), "cache_dir", "resume_from_checkpoint")
# How the ranks share the work, and when checkpoints are saved. Or another recorded value states their effect: the
# split's fingerprint, the model's commit or content, the global batch size, the devices.
WITHOUT_EFFECT = (
    *OUTPUT,
    *("strategy", "activation_checkpointing", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_timeout"),
    *("save_strategy", "save_steps", "save_total_limit", "on_save_failure", "on_duplicates_between_parts"),
    *("csv", "validation_file", "test_file", "dataset_name", "encoding"),
    *("revision", "trust_remote_code", "per_device_train_batch_size", "use_cpu"),
)
# Another value changes rounding or dropout masks from the step on at which a run is resumed with it, and is announced.
ROUNDING = ("gradient_accumulation_steps", "threads", "cpu_offload", "eval_batch_size")
# They decide how rows are evaluated, and which weights are the best. That matters only if a run finishes with those, or
# stops early. The batch size affects the rounding of the scores, and with it the choice between nearly equal ones.
BEST_WEIGHTS = ("metric_for_best_model", "positive_class", "eval_strategy", "eval_steps", "eval_batch_size")
# They choose the rows, the model and the number of steps, which a checkpoint records: those are compared instead.
CHOICES = (
    *("text_column", "label_column", "label_names", "test_size", "validation_size"),
    *("model", "num_train_epochs", "max_steps"),
)
# A checkpoint is rejected if one of these settings has another value: a setting is safe until it is listed above.
MUST_BE_EQUAL = [name for name in TYPES if name not in {*WITHOUT_EFFECT, *CHOICES, *ROUNDING, *BEST_WEIGHTS}]
CONTENT = {
    "model_code_sha256": "the model's Python code has changed",
    "tokens_sha256": "the tokenizer returns other tokens for the same reviews, or pads differently",
}
NEEDED = (  # the keys of run_state.json besides its step
    *("settings", "threads", "arithmetic", "torch", "transformers", "total_steps", "fingerprint", "model_commit"),
    *("model_config", *CONTENT),
)


@dataclass(frozen=True)
class Resume:
    """Where a run continues. With nothing set, it starts from the beginning in a new folder."""

    folder: Path | None = None  # the run's own folder, if it exists already
    checkpoint: Path | None = None  # in `folder` or in another run's folder
    state: dict[str, Any] = field(default_factory=dict)  # the content of the checkpoint's run_state.json
    # The settings of the run so far, from the checkpoint or, without one, from the settings.json in `folder`.
    recorded: dict[str, Any] = field(default_factory=dict)
    lock: int | None = None  # on rank 0, the descriptor that keeps other jobs out of `folder`
    launchers: Collection[str] = ()  # the torchrun processes of this job, by which it recognizes its folder later
    # The differences from the processes that wrote the checkpoint which affect the results. If there are none, the
    # resumed run is bitwise identical to an uninterrupted one.
    changes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The number of completed optimizer steps."""
        return int(self.state.get("step", 0))

    def lines_of(self, log: str) -> list[str]:
        """Return the lines of a log up to the checkpoint's step. Later ones are repeated.

        Raises:
            UserError: a line is damaged, or a step is missing.
        """
        if self.checkpoint is None:
            return []
        path = self.checkpoint.parent.parent / log
        try:
            # Lines keep their ends, which an editor may have changed: the log goes on after their last byte.
            lines = path.read_bytes().decode().splitlines(keepends=True) if path.exists() else []
            complete = [line for line in lines if line.endswith("\n")]  # a kill may cut the last one
            kept = [line for line in complete if json.loads(line)["step"] <= self.step]
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise UserError(f"{path}: damaged, so the run cannot be resumed: {problem}") from None
        if log == STEPS.name and len(kept) != self.step:
            raise UserError(f"{path}: lacks steps before {self.checkpoint}, so the run cannot be resumed from it")
        return kept


# ---- find the checkpoint --------------------------------------------------------------------------------------------


def find_resume(path_name: str, settings: Settings, world: World) -> Resume:
    """Find the checkpoint to resume from, by the rules at the top of this file. Collective.

    The run's own folder, if it exists, is locked before anything in it is looked up.

    Raises:
        AgreedError: there is no such checkpoint, it is damaged, or another job is writing to its folder.
        AlreadyFinished: the run is complete.
    """
    launchers = sorted({launcher for launcher in all_gather_object(launcher_id(), world) if launcher is not None})
    found = Resume()
    with raise_on_all_ranks(world):  # rank 0 looks for all: another node may see an older state of a network folder
        if world.is_main_process:
            found = find_checkpoint(path_name, settings, launchers, warn=world.print_main)
    lock_fd, is_finished = found.lock, bool(found.folder and (found.folder / METRICS.name).is_file())
    found, is_finished = broadcast_object(lambda: (replace(found, lock=None), is_finished), world)
    if is_finished:
        if lock_fd is not None:
            os.close(lock_fd)
        raise AlreadyFinished(f"{found.folder}: the run has finished; nothing is left to do")
    changes = changes_since(found.state, settings, world, arithmetic=gather_arithmetic(world))
    return replace(found, lock=lock_fd, launchers=launchers, changes=changes)


def find_checkpoint(
    path_name: str, settings: Settings, launchers: Collection[str], *, warn: Callable[[str], None]
) -> Resume:
    """Do the work of `find_resume` on rank 0.

    Args:
        launchers: the torchrun processes of this job.
        warn: prints a line about each damaged checkpoint that is skipped.
    """
    requested = settings.resume_from_checkpoint
    source = Path(requested) if requested and requested != "auto" else None
    run, found, checkpoint = find_run(path_name, settings, launchers, source=source), Resume(), None
    if run is not None:
        found = Resume(run, lock=lock(run), recorded=read_settings(run))  # locked before anything is read
        if (run / METRICS.name).is_file():  # it has finished
            return found
        checkpoint = _latest(run, warn)
    if checkpoint is None and source is not None and source.resolve() != run:  # start from another run
        checkpoint = _latest(source, warn)
        if checkpoint is None:
            reason = "has no complete checkpoint" if os.path.isdir(source) else "no such folder"
            raise UserError(f"--resume_from_checkpoint {source}: {reason}")
    if checkpoint is not None:
        state = json.loads((checkpoint / RUN_STATE).read_text(encoding="utf-8"))
        if checkpoint.name != f"{PREFIX}{state.get('step')}":  # names decide which one is the latest
            raise UserError(f"{checkpoint}: can only be resumed as {PREFIX}<step>, under the name it was written with")
        if missing := [key for key in NEEDED if key not in state]:
            raise UserError(f"{checkpoint / RUN_STATE}: lacks {', '.join(missing)}: another version has written it")
        recorded = state["settings"] | {"threads": state["threads"]}
        return replace(found, checkpoint=checkpoint.absolute(), state=state, recorded=recorded)
    if requested is not None or run is not None:  # `reject_used` rejects an --output_dir that holds anything else
        place = run or f"--resume_from_checkpoint {requested}"
        warn(f"{place}: there is no complete checkpoint to resume from, so training starts from the beginning")
    return found


def find_run(path_name: str, settings: Settings, launchers: Collection[str], *, source: Path | None) -> Path | None:
    """Return the folder of the run that this job continues; None if it starts a new one.

    A folder belongs to this job only if one of the torchrun processes recorded in its settings.json still takes part.
    """
    output_dir, parent = settings.output_dir, RUNS / path_name
    runs = [Path(output_dir)] if output_dir else sorted(parent.glob("*"), reverse=True)
    for run in filter(None, [source, *runs] if launchers else []):
        if set(launchers) & set(read_settings(run).get("launchers") or []):
            return run.resolve()
    may_continue = output_dir is None
    if settings.resume_from_checkpoint == "auto":
        source = Path(output_dir or parent / LATEST)
        may_continue = output_dir is not None or not (source / METRICS.name).is_file()
    return source.resolve() if source and may_continue and read_settings(source) else None


def read_settings(run: Path) -> dict[str, Any]:
    """Return the content of a run's settings.json; empty if there is none, or if it belongs to another program."""
    try:
        content = json.loads((run / SETTINGS.name).read_text(encoding="utf-8"))
        return dict(content) if content["world_size"] and content["path"] else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _latest(place: Path, warn: Callable[[str], None]) -> Path | None:
    """Return a checkpoint, or the latest one of a run, that can be used; None if there is none at all.

    Raises:
        UserError: there are only others. To start again would repeat the work, although the cause may be temporary.
    """
    if not os.path.isdir(place):  # unlike Path.is_dir, False for a name that is too long
        return None
    folder, problem = place / CHECKPOINTS, None
    if folder.is_symlink() and not folder.exists():  # for example to a disk that is not mounted
        raise UserError(f"{folder}: links to {os.readlink(folder)}, which does not exist")
    for checkpoint in [place] if (place / RUN_STATE).is_file() else latest_first(folder):
        if (problem := problem_of(checkpoint)) is None:
            return checkpoint
        warn(f"{checkpoint} is skipped: {problem}")
    if problem is not None:
        raise UserError(f"{place}: none of its checkpoints can be used: {checkpoint.name}: {problem}")
    return None


# ---- compare it with this run ---------------------------------------------------------------------------------------


def changes_since(
    state: Mapping[str, Any], settings: Settings, world: World, *, arithmetic: Arithmetic
) -> tuple[str, ...]:
    """List the reasons why a resumed run differs from an uninterrupted one, by rounding or by other dropout masks."""
    if not state:
        return ()
    now = settings.as_dict() | {"threads": settings.threads or state["threads"]}
    before = state["settings"] | {"threads": state["threads"]}
    if world.device.type != "cuda":
        before["cpu_offload"] = now["cpu_offload"]  # on a CPU, the optimizer is always there
    # An unset variable is recorded as such. A fact is missing only if it was not recorded at all: the version that
    # wrote the checkpoint did not know it, or another kind of device does not have it. The device itself is a fact.
    known = [
        (name, state["arithmetic"][name], facts) for name, facts in arithmetic.items() if name in state["arithmetic"]
    ]
    pairs = [
        *((name, ", ".join(old), ", ".join(facts)) for name, old, facts in known),
        ("torch", state["torch"], torch.__version__),
        ("transformers", state["transformers"], transformers.__version__),
        *((name, before[name], now[name]) for name in ROUNDING),
    ]
    return tuple(f"{name}: {value}, was {old}" for name, old, value in pairs if old != value)


def check_compatible(
    resume: Resume, *, settings: Settings, fingerprint: str, total_steps: int, identity: Mapping[str, Any]
) -> None:
    """Check that a checkpoint belongs to the same rows, model and schedule: otherwise bits would differ.

    Raises:
        UserError: the checkpoint does not fit, and the message lists all differences; or a log is damaged.
    """
    if resume.checkpoint is None:
        return
    state, recorded = resume.state, resume.state["settings"]
    chooses = settings.load_best_model_at_end or settings.early_stopping_patience is not None
    names = [*MUST_BE_EQUAL, *(BEST_WEIGHTS if chooses else ())]
    pairs = [
        *((name, recorded.get(name), getattr(settings, name)) for name in names),
        ("total steps", state["total_steps"], total_steps),
        ("split fingerprint", state["fingerprint"][:16], fingerprint[:16]),
        ("the model's commit", state["model_commit"], identity["model_commit"]),
    ]
    differences = [f"{name} was {old} and is {new}" for name, old, new in pairs if old != new]
    differences += [text for key, text in CONTENT.items() if state[key] != identity[key]]
    if changed := changed_keys(state["model_config"] or {}, identity["model_config"] or {}):
        differences.append(f"the model's config has changed: {', '.join(changed)}")
    if differences:
        raise UserError(f"cannot resume from {resume.checkpoint}: {'; '.join(differences)}")
    for log in LOGS:
        resume.lines_of(log.name)  # raises if it is damaged
