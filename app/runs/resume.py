"""Resuming: from which checkpoint, in which run folder, and whether it fits the requested training."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.checkpoint.manager import PREFIX, latest_first, latest_valid_checkpoint, problem_of, was_complete
from app.distributed.collectives import all_gather_object, broadcast_object, raise_on_all_ranks
from app.distributed.environment import launcher_id
from app.distributed.world import World
from app.errors import AlreadyFinished, UserError
from app.runs.folder import RUNS, lock
from app.settings import ModelSettings, Settings, TrainingSettings

STATE = "run_state.json"
STEPS, EVALUATIONS = "steps.jsonl", "evaluations.jsonl"
LOGS = (STEPS, EVALUATIONS)
RESULTS = ("metrics.json", "predictions.csv")  # metrics.json first: a folder that has it holds a finished run
MODEL, OPTIMIZER, RANDOM, SCHEDULE = "model.safetensors", "optimizer.safetensors", "random.safetensors", "schedule.json"
CHECKPOINT_FILES = (MODEL, OPTIMIZER, RANDOM, SCHEDULE, STATE)
# Not compared by name: the number of accumulation steps may change (`Resume.changes` announces it), the length of the
# training is compared as the total number of steps, and the model by its folder or commit.
FREE = {"gradient_accumulation_steps", "num_train_epochs", "max_steps", "bf16"}
FREE |= {"model", "revision", "trust_remote_code"}
# Decide which weights are the best. eval_batch_size changes the last digits of the scores, which decide between two
# that are nearly equal.
BEST = ("metric_for_best_model", "eval_strategy", "eval_steps", "eval_batch_size")


@dataclass(frozen=True)
class Resume:
    """Where a run continues. With nothing set, it starts from the beginning in a new folder.

    Attributes:
        folder: the run's own folder, if it exists already.
        checkpoint: a complete checkpoint, in `folder` or in another run's.
        state: the content of the checkpoint's run_state.json.
        lock: on rank 0, the descriptor that keeps other jobs out of `folder`.
        launchers: identify this job, see `launcher_ids`.
        changes: what differs from the processes that wrote the checkpoint and makes its random streams unusable; empty
            where the resumed run is bitwise identical to an undisturbed one.
    """

    folder: Path | None = None
    checkpoint: Path | None = None
    state: dict[str, Any] = field(default_factory=dict)
    lock: int | None = None
    launchers: Collection[str] = ()
    changes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Optimizer steps that are done."""
        return int(self.state.get("step", 0))

    @property
    def best(self) -> Path | None:
        """The weights that were best before the checkpoint, where that was asked for."""
        step = self.state.get("best", {}).get("step", 0)
        return self.checkpoint.parent / f"best-{step}" if self.checkpoint and step else None

    @property
    def other_seed(self) -> int:
        """Seed for resuming where the saved random streams do not apply. It differs from the initial seed so that
        dropout masks do not repeat."""
        return int(self.state["settings"]["seed"]) + 1_000_003 * self.step

    def lines_of(self, log: str, before: int | None = None) -> list[str]:
        """The lines of a log of the run up to the checkpoint's step: later steps are run again.

        Args:
            before: leave out this step too; an evaluation that follows the checkpoint of its own step is repeated.

        Raises:
            UserError: the log is damaged, or does not hold a line of every step.
        """
        if self.checkpoint is None:
            return []
        path = self.checkpoint.parent.parent / log
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        kept: list[str] = []
        steps: list[int] = []
        for line in text.splitlines(keepends=True):
            try:
                step = int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError):
                if not line.endswith("\n"):
                    break  # the last one, which a killed run had not written to its end
                raise UserError(f"{path}, line {len(kept) + 1}: damaged, so the run can't be resumed") from None
            if step > self.step or step == before:
                break
            kept.append(line)
            steps.append(step)
        if log == STEPS and steps != list(range(1, self.step + 1)):
            raise UserError(f"{path}: lacks steps before {self.checkpoint}, so the run can't be resumed from it")
        return kept


def find_resume(path_name: str, settings: Settings, world: World) -> Resume:
    """Find what `--resume_from_checkpoint` names, or what this job wrote before torchrun restarted it. Collective.

    The run's own folder, if it exists, is locked before anything in it is looked up, so that no other job can add or
    remove checkpoints after that. Another run's checkpoint, from which a new folder starts, is not locked.

    Raises:
        AgreedError: there is no such checkpoint, it is damaged or not visible on every rank, or another job is writing
            in its folder.
        AlreadyFinished: torchrun has restarted a job whose run was complete.
    """
    launchers = sorted({one for one in all_gather_object(launcher_id(), world) if one is not None})
    found = Found()
    with raise_on_all_ranks(world):
        if world.is_main_process:
            # Not only where TORCHELASTIC_RESTART_COUNT is above 0: torchrun does not count the restarts after a node
            # has joined or left.
            own = folder_of_this_job(path_name, settings.output_dir, launchers)
            found = find(path_name, settings, own, world.print_main)
    folder, checkpoint, finished = broadcast_object((found.folder, found.checkpoint, found.finished), world)
    if finished:
        raise AlreadyFinished(f"{folder}: the run had finished before this restart; nothing is left to do")
    state: dict[str, Any] = {}
    if checkpoint is not None:
        with raise_on_all_ranks(world):
            state = _read_state(checkpoint)
    return Resume(folder, checkpoint, state, found.lock, launchers, changes_since(state, settings, world))


def changes_since(state: Mapping[str, Any], settings: Settings, world: World) -> tuple[str, ...]:
    """List what makes a checkpoint's random streams unusable: each rank draws other dropout masks from here on."""
    pairs = [
        ("ranks", state.get("world_size"), world.size),
        ("device", state.get("device"), world.device.type),
        (
            "accumulation steps",
            state.get("settings", {}).get("gradient_accumulation_steps"),
            settings.gradient_accumulation_steps,
        ),
    ]
    return tuple(f"{name}: {now}, was {before}" for name, before, now in pairs if before not in (None, now))


def _read_state(checkpoint: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise UserError(f"{checkpoint}: every rank must be able to read it: {problem}") from None
    missing = [name for name in CHECKPOINT_FILES if not (checkpoint / name).is_file()]
    if missing:
        raise UserError(
            f"{checkpoint}: has no {missing[0]}: an earlier version of this program wrote it; resume it with that one, "
            "or start again in another --output_dir"
        )
    return state


def folder_of_this_job(path_name: str, output_dir: str | None, launchers: Collection[str]) -> Path | None:
    """The run folder that earlier processes of this job created.

    A folder is this job's own only if one of the torchrun processes recorded in its settings.json still takes part: any
    other run, and any other program's folder that happens to hold a settings.json, is somebody else's.
    """
    candidates = [Path(output_dir)] if output_dir is not None else sorted((RUNS / path_name).glob("*"), reverse=True)
    for folder in candidates:
        recorded = _recorded_settings(folder).get("launchers")
        if isinstance(recorded, list) and set(launchers) & {one for one in recorded if isinstance(one, str)}:
            return folder.resolve()
    return None


def _recorded_settings(folder: Path) -> dict[str, Any]:
    """What a run's settings.json holds; nothing if there is none, or if it is some other program's."""
    try:
        content = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_run = isinstance(content, dict) and {"path", "world_size", "csv", "train_batch_size"} <= content.keys()
    return content if is_run else {}


def _latest_valid(run: Path, say: Callable[[str], None]) -> Path | None:
    """The latest valid checkpoint of a run that is to be resumed in place.

    Raises:
        UserError: there were complete checkpoints, and none can be read. Starting from the beginning would remove them,
            although the cause may pass.
    """
    checkpoint = latest_valid_checkpoint(run / "checkpoints", say)
    if checkpoint is None and any(was_complete(one) for one in latest_first(run / "checkpoints")):
        raise UserError(f"{run}: none of its checkpoints can be read: start again in another --output_dir")
    return checkpoint


@dataclass(frozen=True)
class Found:
    """What `find` found. `folder` is locked if it is set; `finished`: it holds this job's complete run."""

    folder: Path | None = None
    checkpoint: Path | None = None
    lock: int | None = None
    finished: bool = False


def find(path_name: str, settings: Settings, own: Path | None, say: Callable[[str], None]) -> Found:
    """Choose the folder and the checkpoint to resume from, on one rank.

    Args:
        own: the folder that this job created before torchrun restarted it.
        say: reports each damaged checkpoint that is skipped.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or another job is writing in its folder.
    """
    requested = settings.resume_from_checkpoint
    if own is not None:
        held = lock(own)
        if (own / RESULTS[0]).is_file():
            return Found(own, None, held, finished=True)
        checkpoint = _latest_valid(own, say)
        if checkpoint is None and requested not in (None, "auto"):
            checkpoint = _requested_checkpoint(str(requested), say)
        return Found(own, checkpoint, held)
    if requested is None:
        return Found()
    if requested == "auto":
        return _find_latest(path_name, settings.output_dir, say)
    if settings.output_dir is not None:  # a new run that starts from another one's checkpoint
        return Found(None, _requested_checkpoint(requested, say))
    path = Path(requested).resolve()
    run = path.parent.parent if _is_checkpoint(path) else path
    if not (run / "settings.json").is_file():  # not a run folder: leave it unlocked, and report what is wrong
        _requested_checkpoint(requested, say)
    held = lock(run)
    return Found(run, _requested_checkpoint(requested, say), held)


def _is_checkpoint(path: Path) -> bool:
    """By its name, which a run folder may have too."""
    return path.name.startswith(PREFIX) and not (path / "settings.json").is_file()


def _requested_checkpoint(requested: str, say: Callable[[str], None]) -> Path:
    path = Path(requested)
    if not path.is_dir():
        raise UserError(f"--resume_from_checkpoint {requested}: no such folder")
    if _is_checkpoint(path):
        problem, checkpoint = problem_of(path), path
    else:
        checkpoint = latest_valid_checkpoint(path / "checkpoints", say) or path
        problem = "has no complete checkpoint" if checkpoint == path else None
    checkpoint = checkpoint.resolve()
    run = checkpoint.parent.parent
    if problem is None and (checkpoint.parent.name != "checkpoints" or not (run / "settings.json").is_file()):
        problem = "is not inside a run folder; copy the whole run folder, because its logs are needed to resume"
    if problem is not None:
        raise UserError(f"--resume_from_checkpoint {requested}: {problem}")
    return checkpoint


def _find_latest(path_name: str, output_dir: str | None, say: Callable[[str], None]) -> Found:
    """`auto`: the training path's latest run if it has not finished, or the run in the requested folder."""
    folder = Path(output_dir) if output_dir else (RUNS / path_name / "latest").resolve()
    recorded = _recorded_settings(folder)
    if not recorded:  # any other folder that is not empty is refused later
        say("--resume_from_checkpoint auto: there is no run to resume, so this one starts from the beginning")
        return Found()
    if recorded["path"] != path_name:
        raise UserError(f"--output_dir {folder}: holds a run of {recorded['path']}: name another folder")
    held = lock(folder)
    finished = (folder / RESULTS[0]).is_file()
    if finished and output_dir is None:
        os.close(held)
        return Found()
    checkpoint = _latest_valid(folder, say)
    if finished and checkpoint is None:
        raise UserError(f"--output_dir {folder}: holds a finished run and no checkpoint to resume from: name a new one")
    return Found(folder.resolve(), checkpoint, held)


def check_fits(
    resume: Resume,
    path_name: str,
    settings: Settings,
    fingerprint: str,
    total_steps: int,
    model_commit: str | None = None,
) -> None:
    """Check that a checkpoint is of the same training path, rows, model and schedule. Otherwise the resumed run would
    not be bitwise identical to an undisturbed one.

    Args:
        settings: with the learning rate resolved.
        model_commit: the commit on the Hub that the model is loaded from; None for any other model.

    Raises:
        UserError: it is not; names everything that differs.
    """
    if resume.checkpoint is None:
        return
    # A checkpoint from before a setting existed was trained with what is now its default.
    before = Settings().as_dict() | resume.state["settings"]
    names = [f.name for group in (ModelSettings, TrainingSettings) for f in dataclasses.fields(group)]
    # With three ranks or more, DDP's buckets decide in which order gradients are added.
    names += ["ddp_find_unused_parameters", "ddp_bucket_cap_mb"]
    names += ["max_length", "load_best_model_at_end", *(BEST if settings.load_best_model_at_end else ())]
    pairs = [(name, before.get(name), getattr(settings, name)) for name in names if name not in FREE]
    pairs += [("total steps", resume.state["total_steps"], total_steps)]
    pairs += [("split fingerprint", resume.state["fingerprint"][:16], fingerprint[:16])]
    pairs += [("path", resume.state["path"], path_name)]
    pairs += [("model", _model_name(before["model"]), _model_name(settings.model))]
    # A checkpoint of an older version does not name the commit, so nothing is known that could differ.
    commit = resume.state.get("model_commit", model_commit)
    differing = [f"{name} was {old} and is {new}" for name, old, new in pairs if old != new]
    if commit != model_commit:
        differing.append(f"the model's commit was {commit} and is {model_commit} (add --revision {commit})")
    if differing:
        raise UserError(f"can't resume from {resume.checkpoint}: {'; '.join(differing)}")
    for log in LOGS:
        resume.lines_of(log)  # raises if a log is damaged
    if settings.load_best_model_at_end and resume.best is not None and (problem := problem_of(resume.best)):
        raise UserError(f"can't resume from {resume.checkpoint}: {resume.best}, the best weights before it: {problem}")


def _model_name(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).is_dir() else model
