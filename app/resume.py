"""Going on from a checkpoint: which one, in which folder, and whether it fits what is asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.distributed.checkpoints import PREFIX, newest, problem_of
from app.distributed.processes import World, from_main, recall, restarted, together
from app.errors import UserError
from app.files import RUNS
from app.settings import ModelSettings, Settings, TrainingSettings

STATE = "run_state.json"
STEPS = "steps.jsonl"
LOGS = (STEPS, "evaluations.jsonl")
RESULTS = ("metrics.json", "predictions.csv")
RUN_FOLDER = "run folder"
# What may change without making another training of it: the batch is global, so how it is divided is only rounding.
FREE = {"gradient_accumulation_steps", "num_train_epochs", "max_steps", "bf16"}
FREE |= {"model", "revision", "trust_remote_code"}  # compared by folder or commit, not by name
# Decide which weights are the best: the batch size by the last digits of a score, where two are nearly equal.
BEST = ("metric_for_best_model", "eval_strategy", "eval_steps", "eval_batch_size")


@dataclass(frozen=True)
class Resume:
    """Where a run goes on. Nothing set: it begins, in a new folder.

    `folder` is the run's own, where there is one already; `checkpoint` is whole, and `state` is what its run_state.json
    says.
    """

    folder: Path | None = None
    checkpoint: Path | None = None
    state: dict[str, Any] = field(default_factory=dict)

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
        """For random streams that can't be gone on with: not that of the beginning, whose masks would come again."""
        return int(self.state["settings"]["seed"]) + 1_000_003 * self.step

    def lines_of(self, log: str) -> list[str]:
        """The lines of a log of the run that are not after the checkpoint: what came later is done again.

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
                raise UserError(f"{path}, line {len(kept) + 1}: damaged, so the run can't go on") from None
            if step > self.step:
                break
            kept.append(line)
            steps.append(step)
        if log == STEPS and steps != list(range(1, self.step + 1)):
            raise UserError(f"{path}: lacks steps before {self.checkpoint}, so the run can't go on from there")
        return kept


def find_resume(path_name: str, settings: Settings, world: World) -> Resume:
    """What `--resume_from_checkpoint` asks for, or what a generation of processes that torchrun has restarted goes on
    from.

    Raises:
        AgreedError: no such checkpoint, or it is damaged, or not all ranks can see it.
    """
    found: tuple[Path | None, Path | None] = (None, None)
    own = recall(RUN_FOLDER)
    if restarted() and own is None and settings.output_dir and (Path(settings.output_dir) / "settings.json").is_file():
        own = settings.output_dir  # torchrun's store died with its node, but the folder that was asked for says as much
    with together():
        if world.is_main:
            found = _find(path_name, settings, own, world.say)
    folder, checkpoint = from_main(found)
    if checkpoint is None:
        return Resume(folder)
    with together():
        try:
            state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            raise UserError(f"{checkpoint}: every rank must be able to read it: {problem}") from None
    return Resume(folder, checkpoint, state)


def _find(
    path_name: str, settings: Settings, own: str | None, say: Callable[[str], None]
) -> tuple[Path | None, Path | None]:
    """(folder to go on in, checkpoint to go on from), each None where there is none. `own`: the folder that this job's
    earlier processes had, before torchrun started it anew."""
    asked = settings.resume_from_checkpoint
    if own is not None:
        checkpoint = newest(Path(own) / "checkpoints", say)
        if checkpoint is not None or asked in (None, "auto"):
            return Path(own), checkpoint
    if asked is None:
        return None, None
    if asked == "auto":
        return _find_latest(path_name, settings.output_dir, say)
    path = Path(asked)
    if not path.is_dir():
        raise UserError(f"--resume_from_checkpoint {asked}: no such folder")
    if path.name.startswith(PREFIX):
        problem, checkpoint = problem_of(path), path
    else:
        checkpoint = newest(path / "checkpoints", say) or path
        problem = "holds no checkpoint that is whole" if checkpoint == path else None
    checkpoint = checkpoint.resolve()
    run = checkpoint.parent.parent
    if problem is None and (checkpoint.parent.name != "checkpoints" or not (run / "settings.json").is_file()):
        problem = "lies in no run's folder, whose logs a run goes on with: copy the whole folder"
    if problem is not None:
        raise UserError(f"--resume_from_checkpoint {asked}: {problem}")
    if own is not None:
        return Path(own), checkpoint
    return (None if settings.output_dir else run), checkpoint


def _find_latest(path_name: str, output_dir: str | None, say: Callable[[str], None]) -> tuple[Path | None, Path | None]:
    """`auto`: the road's latest run, if that has not finished, or the run in the folder that was asked for."""
    folder = Path(output_dir) if output_dir else RUNS / path_name / "latest"
    if not (folder / "settings.json").is_file():
        return None, None  # nothing to go on with
    finished = (folder / "metrics.json").is_file()
    if finished and output_dir is None:
        return None, None
    checkpoint = newest(folder / "checkpoints", say)
    if finished and checkpoint is None:
        raise UserError(f"--output_dir {folder}: holds a finished run, and no checkpoint to go on from: name a new one")
    return folder.resolve(), checkpoint


def check_fits(
    resume: Resume,
    path_name: str,
    settings: Settings,
    fingerprint: str,
    total_steps: int,
    model_commit: str | None = None,
) -> None:
    """A checkpoint goes on with the same road, rows, model and schedule, else its equality with an undisturbed run is
    lost. `settings` has its learning rate filled in; `model_commit` is the Hub's, None for any other model.

    Raises:
        UserError: it doesn't; names all that differs.
    """
    if resume.checkpoint is None:
        return
    before = resume.state["settings"]
    names = [f.name for group in (ModelSettings, TrainingSettings) for f in dataclasses.fields(group)]
    names += ["max_length", "load_best_model_at_end", *(BEST if settings.load_best_model_at_end else ())]
    pairs = [(name, before.get(name), getattr(settings, name)) for name in names if name not in FREE]
    pairs += [("total steps", resume.state["total_steps"], total_steps)]
    pairs += [("split fingerprint", resume.state["fingerprint"][:16], fingerprint[:16])]
    pairs += [("road", resume.state["path"], path_name)]
    pairs += [("model", _model_name(before["model"]), _model_name(settings.model))]
    # A checkpoint of an older version does not name the commit, so nothing is known that could differ.
    commit = resume.state.get("model_commit", model_commit)
    differing = [f"{name} was {old} and is {new}" for name, old, new in pairs if old != new]
    if commit != model_commit:
        differing.append(f"the model's commit was {commit} and is {model_commit} (add --revision {commit})")
    if differing:
        raise UserError(f"can't go on from {resume.checkpoint}: {'; '.join(differing)}")
    for log in LOGS:
        resume.lines_of(log)
    if settings.load_best_model_at_end and resume.best is not None and (problem := problem_of(resume.best)):
        raise UserError(f"can't go on from {resume.checkpoint}: {resume.best}, the best weights before it: {problem}")


def _model_name(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).is_dir() else model
