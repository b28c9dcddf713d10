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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from ..common.errors import AlreadyFinished, UserError
from ..common.machine import Arithmetic, changes_of_arithmetic
from ..distributed.collectives import all_gather_object, broadcast_object, gather_arithmetic, raise_on_all_ranks
from ..distributed.environment import launcher_id
from ..distributed.world import World
from ..metrics.early_stopping import EarlyStopping
from ..model.identity import changed_keys
from ..runs.folder import lock
from ..runs.schema import CHECKPOINTS, EVALUATIONS, LATEST, METRICS, RUN_STATE, RUNS, SETTINGS, STEPS
from ..runs.setting_effects import BEST_WEIGHTS, CHOICES, ROUNDING, WITHOUT_EFFECT
from ..settings import TYPES, Settings
from .manager import PREFIX, latest_first, problem_of

# A checkpoint is rejected if one of these settings has another value. With --load_best_model_at_end or
# --early_stopping_patience, those in BEST_WEIGHTS must be equal, too. `changes_since` announces those in ROUNDING.
MUST_BE_EQUAL = [name for name in TYPES if name not in {*WITHOUT_EFFECT, *CHOICES, *ROUNDING, *BEST_WEIGHTS}]
CONTENT = {
    "model_code_sha256": "the model's Python code has changed",
    "tokens_sha256": "the tokenizer returns other tokens for the same reviews, or pads differently",
}


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
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]  # a kill may cut the last
            steps = [json.loads(line)["step"] for line in lines]
            kept = [(step, line) for step, line in zip(steps, lines, strict=True) if step <= self.step]
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise UserError(f"{path}: damaged, so the run cannot be resumed: {problem}") from None
        if log == STEPS.name and [step for step, _ in kept] != list(range(1, self.step + 1)):
            raise UserError(f"{path}: lacks steps before {self.checkpoint}, so the run cannot be resumed from it")
        return [line for _, line in kept]


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
            own = folder_of_this_job(path_name, settings, launchers)
            found = find_checkpoint(path_name, settings, own=own, warn=world.print_main)
    lock_fd, is_finished = found.lock, bool(found.folder and (found.folder / METRICS.name).is_file())
    found, is_finished = broadcast_object((replace(found, lock=None), is_finished), world)
    if is_finished:
        if lock_fd is not None:
            os.close(lock_fd)
        raise AlreadyFinished(f"{found.folder}: the run has finished; nothing is left to do")
    changes = changes_since(found.state, settings, world, arithmetic=gather_arithmetic(world))
    return replace(found, lock=lock_fd, launchers=launchers, changes=changes)


def folder_of_this_job(path_name: str, settings: Settings, launchers: Collection[str]) -> Path | None:
    """Return the run folder that earlier processes of this job wrote to; None if there is none. Call it on rank 0.

    A folder belongs to this job only if one of the torchrun processes recorded in its settings.json still takes part.
    """
    places = [Path(settings.output_dir)] if settings.output_dir else sorted((RUNS / path_name).glob("*"), reverse=True)
    if settings.resume_from_checkpoint not in (None, "auto"):
        places.insert(0, Path(str(settings.resume_from_checkpoint)))
    for folder in places:
        if set(launchers) & set(read_settings(folder).get("launchers") or []):
            return folder.resolve()
    return None


def find_checkpoint(path_name: str, settings: Settings, *, own: Path | None, warn: Callable[[str], None]) -> Resume:
    """Do the work of `find_resume` on rank 0.

    Args:
        own: the result of `folder_of_this_job`.
        warn: prints a line about each damaged checkpoint that is skipped.
    """
    requested, output_dir = settings.resume_from_checkpoint, settings.output_dir
    if own is not None:
        is_other = requested not in (None, "auto") and Path(str(requested)).resolve() != own
        return _continue_run(own, path_name, warn, until_then=Path(str(requested)) if is_other else None)
    if requested is None:
        return Resume()
    if requested == "auto":
        run = Path(output_dir) if output_dir else RUNS / path_name / LATEST
        if not read_settings(run) or (output_dir is None and (run / METRICS.name).is_file()):
            warn("--resume_from_checkpoint auto: there is no run to resume, so training starts from the beginning")
            return Resume()  # `reject_used` rejects an --output_dir that holds anything else
    else:
        run = Path(requested)
        if output_dir is not None or not read_settings(run):
            return _read_state(None, _requested_checkpoint(run, warn), path_name)
    return _continue_run(run.resolve(), path_name, warn)


def _continue_run(run: Path, path_name: str, warn: Callable[[str], None], *, until_then: Path | None = None) -> Resume:
    """Lock a run, and find its latest checkpoint, or the one to start from until it has written its first."""
    lock_fd = lock(run)
    recorded = read_settings(run)
    _check_path(run, recorded, path_name)
    if (run / METRICS.name).is_file():  # it has finished
        return Resume(run, recorded=recorded, lock=lock_fd)
    checkpoint = _latest(run, warn)
    if checkpoint is None and until_then is not None:
        checkpoint = _requested_checkpoint(until_then, warn)
    if checkpoint is not None:
        return replace(_read_state(run, checkpoint, path_name), lock=lock_fd)
    warn(f"{run} has no complete checkpoint, so training starts from the beginning")
    return Resume(run, recorded=recorded, lock=lock_fd)


def _latest(run: Path, warn: Callable[[str], None]) -> Path | None:
    """Return the latest checkpoint of a run that can be used; None if it has not written any.

    Raises:
        UserError: there are only others. To start again would repeat the work, although the cause may be temporary.
    """
    folder = run / CHECKPOINTS
    skipped: list[str] = []
    if folder.is_symlink() and not folder.exists():  # for example to a disk that is not mounted
        raise UserError(f"{folder}: links to {os.readlink(folder)}, which does not exist")
    for checkpoint in latest_first(folder):
        problem = problem_of(checkpoint)
        if problem is None:
            for line in skipped:
                warn(line)
            return checkpoint
        skipped.append(f"{checkpoint} is skipped: {problem}")
    if skipped:
        raise UserError(f"{run}: none of its checkpoints can be used: {skipped[0]}")
    return None


def _requested_checkpoint(path: Path, warn: Callable[[str], None]) -> Path:
    """Return a checkpoint that is named, or the latest one of a run that is named."""
    checkpoint = path if (path / RUN_STATE).is_file() else _latest(path, warn)
    if checkpoint is None:
        reason = "has no complete checkpoint" if path.is_dir() else "no such folder"
        raise UserError(f"--resume_from_checkpoint {path}: {reason}")
    if (problem := problem_of(checkpoint)) is not None:
        raise UserError(f"--resume_from_checkpoint {checkpoint}: {problem}")
    return checkpoint.absolute()


def _read_state(folder: Path | None, checkpoint: Path, path_name: str) -> Resume:
    """Read what a checkpoint records, which `problem_of` has found to be complete and of this version."""
    try:
        state = json.loads((checkpoint / RUN_STATE).read_text(encoding="utf-8"))
        recorded = state["settings"] | {"threads": state["threads"]}
        _check_path(checkpoint, state, path_name)
        # Names decide which checkpoint is the latest, and which ones are rotated.
        if checkpoint.name != (name := f"{PREFIX}{state['step']}"):
            raise UserError(f"{checkpoint}: holds step {state['step']}, so it was renamed or copied: name it {name}")
    except (OSError, KeyError, TypeError) as problem:
        raise UserError(f"{checkpoint / RUN_STATE}: damaged: {problem!r}") from None
    return Resume(folder, checkpoint, state, recorded)


def _check_path(place: Path, recorded: Mapping[str, Any], path_name: str) -> None:
    if recorded.get("path", path_name) != path_name:
        raise UserError(f"{place}: only {recorded['path']}, which wrote it, can resume it")


def read_settings(run: Path) -> dict[str, Any]:
    """Return the content of a run's settings.json; empty if there is none, or if it belongs to another program."""
    try:
        content = json.loads((run / SETTINGS.name).read_text(encoding="utf-8"))
        return dict(content) if content["world_size"] and content["path"] else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


# ---- compare it with this run ---------------------------------------------------------------------------------------


def changes_since(
    state: Mapping[str, Any], settings: Settings, world: World, *, arithmetic: Arithmetic
) -> tuple[str, ...]:
    """List the reasons why a resumed run differs from an uninterrupted one, by rounding or by other dropout masks."""
    if not state:
        return ()
    recorded = state["settings"]
    # On a CPU, the optimizer is always there.
    offloaded_before = recorded["cpu_offload"] if world.device.type == "cuda" else None
    pairs = [
        *changes_of_arithmetic(state["arithmetic"], arithmetic),
        ("torch", state["torch"], torch.__version__),
        ("transformers", state["transformers"], transformers.__version__),
        ("optimizer on the CPU", offloaded_before, settings.cpu_offload),
        ("evaluation batch size", recorded["eval_batch_size"], settings.eval_batch_size),
        ("accumulation steps", recorded["gradient_accumulation_steps"], settings.gradient_accumulation_steps),
        ("threads per rank", state["threads"], settings.threads or state["threads"]),
    ]
    return tuple(f"{name}: {now}, was {before}" for name, before, now in pairs if before not in (None, now))


def check_compatible(
    resume: Resume,
    *,
    settings: Settings,
    fingerprint: str,
    total_steps: int,
    identity: Mapping[str, Any],
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
    resume.lines_of(STEPS.name)  # raises if it is damaged
    stopping, evaluations = EarlyStopping(settings), resume.lines_of(EVALUATIONS.name)
    patience = settings.early_stopping_patience
    stopping.add_all(line for line in evaluations if json.loads(line)["step"] < resume.step)
    if stopping.stops:
        raise UserError(
            f"cannot resume from {resume.checkpoint}: with --early_stopping_patience {patience} the run stops before "
            "it: raise the patience, or resume from an earlier checkpoint"
        )
