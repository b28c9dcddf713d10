"""Check that a checkpoint fits the requested training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.errors import UserError
from ..model.identity import ModelIdentity, differences_of_configs
from ..runs.schema import LOGS
from ..runs.setting_effects import BEST_WEIGHTS, EVERY_STEP
from ..setting_groups import TINY
from ..settings import Settings
from .manager import problem_of
from .resume import Resume

# `Resume.changes` announces another value of `setting_effects.ROUNDING`.
MUST_BE_EQUAL = (*EVERY_STEP, "load_best_model_at_end")
# With --load_best_model_at_end. The batch size affects the rounding of the scores, and with it the choice between two
# that are nearly equal.
BEST_SETTINGS = (*BEST_WEIGHTS, "eval_batch_size")


def check_compatible(
    resume: Resume,
    *,
    path_name: str,
    settings: Settings,
    fingerprint: str,
    total_steps: int,
    model: ModelIdentity = ModelIdentity(),  # noqa: B008  # it is immutable
) -> None:
    """Check that a checkpoint belongs to the same training path, rows, model and schedule.

    Otherwise the resumed run would not be bitwise identical to an uninterrupted one.

    Args:
        settings: with the default learning rate filled in.
        fingerprint: of the split.
        model: the content of the model's files.

    Raises:
        UserError: the checkpoint does not fit, and the message lists all differences; or a log or the best weights are
            damaged.
    """
    if resume.checkpoint is None:
        return
    # A checkpoint that is older than a setting was trained with what is now the setting's default.
    before = Settings().as_dict() | resume.state["settings"]
    names = [*MUST_BE_EQUAL, *(BEST_SETTINGS if settings.load_best_model_at_end else ())]
    pairs = [(name, before.get(name), getattr(settings, name)) for name in names]
    pairs += [("total steps", resume.state["total_steps"], total_steps)]
    pairs += [("split fingerprint", resume.state["fingerprint"][:16], fingerprint[:16])]
    pairs += [("path", resume.state["path"], path_name)]
    has_content = resume.state.get("model_config") is not None  # checkpoints of older versions do not
    commits = (resume.state.get("model_commit"), model.commit)
    if not has_content or not _are_folders((before["model"], settings.model), commits):
        pairs += [("model", _model_name(before["model"]), _model_name(settings.model))]
    differences = [f"{name} was {old} and is {new}" for name, old, new in pairs if old != new]
    # Checkpoints of older versions do not record the commit, so there is nothing to compare.
    commit = resume.state.get("model_commit", model.commit)
    if commit != model.commit:
        differences.append(f"the model's commit was {commit} and is {model.commit} (add --revision {commit})")
    # The settings, classes and rows that are compared above also affect config and tokens.
    if has_content and not differences:
        differences = _differences_in_content(resume.state, settings.model, model)
    if differences:
        raise UserError(f"can't resume from {resume.checkpoint}: {'; '.join(differences)}")
    for log in LOGS:
        resume.lines_of(log)  # raises if a log is damaged
    if settings.load_best_model_at_end and resume.best is not None and (problem := problem_of(resume.best)):
        raise UserError(f"can't resume from {resume.checkpoint}: {resume.best}, the best weights before it: {problem}")


def _are_folders(names: Sequence[str], commits: Sequence[str | None]) -> bool:
    """Return whether both models are local folders, of which only the content counts. The first may have been moved."""
    return TINY not in names and set(commits) == {None}


def _differences_in_content(state: Mapping[str, Any], name: str, model: ModelIdentity) -> list[str]:
    """Compare what the model computes from its weights and the reviews."""
    found = differences_of_configs(state["model_config"], model.config or {})
    found = [f"config.json of --model {name} has changed: {', '.join(found)}"] if found else []
    if state.get("model_code_sha256") != model.code:
        found += [f"the Python code of --model {name} has changed"]
    if state.get("tokens_sha256") != model.tokens:
        found += [f"the tokenizer of --model {name} returns other tokens for the same reviews, or pads differently"]
    return found


def _model_name(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).is_dir() else model
