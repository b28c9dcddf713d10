"""Check that a checkpoint fits the requested training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.checkpoint.manager import problem_of
from app.errors import UserError
from app.model.identity import ModelIdentity, differences_of_configs
from app.runs.resume import Resume
from app.runs.schema import LOGS
from app.settings import TINY, Settings

# Every setting is in one of these groups (a test requires it). Those of the first must be equal.
MUST_BE_EQUAL = (
    *("max_length", "dropout", "train_batch_size", "logical_ranks", "learning_rate", "lr_scheduler_type"),
    *("warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("train_sampling_strategy", "seed", "precision", "ddp_comm_hook", "deterministic", "load_best_model_at_end"),
)
# These are compared in another form.
COMPARED_AS = {
    "split fingerprint": ("csv", "text_column", "label_column", "test_size", "validation_size"),
    "model": ("model", "revision", "trust_remote_code"),  # its content or commit
    "total steps": ("num_train_epochs", "max_steps"),
    "precision": ("bf16",),
    "train_batch_size": ("per_device_train_batch_size",),  # the resolved global batch size
}
# Another value changes rounding or dropout masks from the checkpoint on: `Resume.changes` announces it.
ANNOUNCED = (
    *("gradient_accumulation_steps", "eval_batch_size", "threads", "use_cpu", "cpu_offload", "deepspeed", "fsdp"),
)
# These affect neither weights nor predictions. `strategy` and the others that say how ranks share the work do not
# affect a single bit; how often a run evaluates, saves and logs is visible in its files.
WITHOUT_EFFECT = (
    *("strategy", "activation_checkpointing", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_timeout"),
    *("eval_strategy", "eval_steps", "metric_for_best_model"),  # without --load_best_model_at_end: see below
    *("save_strategy", "save_steps", "save_total_limit", "on_save_failure", "resume_from_checkpoint"),
    *("cache_dir", "output_dir", "logging_steps", "disable_tqdm", "dry_run", "profile", "measure_peak_flops"),
)
# These decide which weights are the best. eval_batch_size affects the rounding of the scores, and with it the choice
# between two that are nearly equal.
BEST_SETTINGS = ("metric_for_best_model", "eval_strategy", "eval_steps", "eval_batch_size")


def check_compatible(
    resume: Resume,
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
