"""Check that a checkpoint fits the requested training."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from app.checkpoint.manager import problem_of
from app.errors import UserError
from app.runs.resume import Resume
from app.runs.schema import LOGS
from app.settings import ModelSettings, Settings, TrainingSettings

# Model and training settings that a resumed run may change (`Resume.changes` announces another number of accumulation
# steps), or that are compared in another form: the length of the training as the total number of steps, the model as
# its folder or commit, and bf16 as the precision.
MAY_DIFFER = {"gradient_accumulation_steps", "num_train_epochs", "max_steps", "bf16"}
MAY_DIFFER |= {"model", "revision", "trust_remote_code"}
MAY_DIFFER |= {"per_device_train_batch_size"}  # compared as the resolved global batch size
# These decide which weights are the best. eval_batch_size affects the rounding of the scores, and with it the choice
# between two that are nearly equal.
BEST_SETTINGS = ("metric_for_best_model", "eval_strategy", "eval_steps", "eval_batch_size")


def check_compatible(
    resume: Resume,
    path_name: str,
    settings: Settings,
    fingerprint: str,
    total_steps: int,
    model_commit: str | None = None,
) -> None:
    """Check that a checkpoint belongs to the same training path, rows, model and schedule.

    Otherwise the resumed run would not be bitwise identical to an undisturbed one.

    Args:
        settings: with the default learning rate filled in.
        fingerprint: of the split.
        model_commit: the commit on the Hub that the model is loaded from; None for any other model.

    Raises:
        UserError: the checkpoint does not fit, and the message lists all differences; or a log or the best weights are
            damaged.
    """
    if resume.checkpoint is None:
        return
    # A checkpoint that is older than a setting was trained with what is now the setting's default.
    before = Settings().as_dict() | resume.state["settings"]
    names = [f.name for group in (ModelSettings, TrainingSettings) for f in fields(group) if f.name not in MAY_DIFFER]
    names += ["max_length", "load_best_model_at_end", *(BEST_SETTINGS if settings.load_best_model_at_end else ())]
    pairs = [(name, before.get(name), getattr(settings, name)) for name in names]
    pairs += [("total steps", resume.state["total_steps"], total_steps)]
    pairs += [("split fingerprint", resume.state["fingerprint"][:16], fingerprint[:16])]
    pairs += [("path", resume.state["path"], path_name)]
    pairs += [("model", _model_name(before["model"]), _model_name(settings.model))]
    differences = [f"{name} was {old} and is {new}" for name, old, new in pairs if old != new]
    # Checkpoints of older versions do not record the commit, so there is nothing to compare.
    commit = resume.state.get("model_commit", model_commit)
    if commit != model_commit:
        differences.append(f"the model's commit was {commit} and is {model_commit} (add --revision {commit})")
    if differences:
        raise UserError(f"can't resume from {resume.checkpoint}: {'; '.join(differences)}")
    for log in LOGS:
        resume.lines_of(log)  # raises if a log is damaged
    if settings.load_best_model_at_end and resume.best is not None and (problem := problem_of(resume.best)):
        raise UserError(f"can't resume from {resume.checkpoint}: {resume.best}, the best weights before it: {problem}")


def _model_name(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).is_dir() else model
