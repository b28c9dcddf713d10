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
LOGS = ("steps.jsonl", "evaluations.jsonl")
RESULTS = ("metrics.json", "predictions.csv")
RUN_FOLDER = "run folder"
# What may change without making another training of it: the batch is global, so how it is divided is only rounding.
FREE = {"gradient_accumulation_steps", "trust_remote_code", "num_train_epochs", "max_steps", "bf16", "model"}


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
    def other_seed(self) -> int:
        """For random streams that can't be gone on with: not that of the beginning, whose masks would come again."""
        return int(self.state["settings"]["seed"]) + 1_000_003 * self.step

    def lines_of(self, log: str) -> str:
        """The lines of a log of the run that are not after the checkpoint: what came later is done again."""
        if self.checkpoint is None:
            return ""
        path = self.checkpoint.parent.parent / log
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        # A killed run may have left half a line, but never before the checkpoint: each is written before it.
        return "".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.step)


def find_resume(path_name: str, settings: Settings, world: World) -> Resume:
    """What `--resume_from_checkpoint` asks for, or what a generation of processes that torchrun has restarted goes on
    from.

    Raises:
        AgreedError: no such checkpoint, or it is damaged, or not all ranks can see it.
    """
    found: tuple[Path | None, Path | None] = (None, None)
    # Where torchrun's store died with its node nothing is remembered, but a folder that was asked for says as much.
    asked = "auto" if restarted() and settings.output_dir else settings.resume_from_checkpoint
    with together():
        if world.is_main:
            found = _find(path_name, settings, asked, world.say)
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
    path_name: str, settings: Settings, asked: str | None, say: Callable[[str], None]
) -> tuple[Path | None, Path | None]:
    """(folder to go on in, checkpoint to go on from), each None where there is none."""
    remembered = recall(RUN_FOLDER)
    if remembered is not None:
        own = newest(Path(remembered) / "checkpoints", say)
        if own is not None or asked in (None, "auto"):
            return Path(remembered), own
    if asked is None:
        return None, None
    if asked == "auto":
        folder = Path(settings.output_dir) if settings.output_dir else RUNS / path_name / "latest"
        is_run = (folder / "settings.json").is_file()
        if not is_run or (settings.output_dir is None and (folder / "metrics.json").is_file()):
            return None, None  # nothing to go on with
        return folder.resolve(), newest(folder / "checkpoints", say)
    path = Path(asked)
    if not path.is_dir():
        raise UserError(f"--resume_from_checkpoint {asked}: no such folder")
    if path.name.startswith(PREFIX):
        problem, checkpoint = problem_of(path), path
    else:
        checkpoint = newest(path / "checkpoints", say) or path
        problem = "holds no checkpoint that is whole" if checkpoint == path else None
    if problem is not None:
        raise UserError(f"--resume_from_checkpoint {asked}: {problem}")
    checkpoint = checkpoint.resolve()
    if remembered is not None:
        return Path(remembered), checkpoint
    return (None if settings.output_dir else checkpoint.parent.parent), checkpoint


def check_fits(resume: Resume, path_name: str, settings: Settings, fingerprint: str, total_steps: int) -> None:
    """A checkpoint goes on with the same road, rows, model and schedule, else its equality with an undisturbed run is
    lost. `settings` has its learning rate filled in.

    Raises:
        UserError: it doesn't; names all that differs.
    """
    if resume.checkpoint is None:
        return
    before = resume.state["settings"]
    names = [f.name for group in (ModelSettings, TrainingSettings) for f in dataclasses.fields(group)]
    pairs = [(name, before.get(name), getattr(settings, name)) for name in ["max_length", *names] if name not in FREE]
    pairs += [("total steps", resume.state["total_steps"], total_steps)]
    pairs += [("split fingerprint", resume.state["fingerprint"][:16], fingerprint[:16])]
    pairs += [("road", resume.state["path"], path_name)]
    pairs += [("model", _model_name(before["model"]), _model_name(settings.model))]
    differing = [f"{name} was {old} and is {new}" for name, old, new in pairs if old != new]
    if differing:
        raise UserError(f"can't go on from {resume.checkpoint}: {'; '.join(differing)}")


def _model_name(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).is_dir() else model
