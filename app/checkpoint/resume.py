"""Where a run resumes, whether the checkpoint fits the requested training, and why the results would differ.

`find_resume`, `restore_settings` and `check_compatible` are called in this order, the last one when the data and the
model are known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from ..common.errors import AlreadyFinished, UserError
from ..common.machine import Arithmetic, changes_of_arithmetic, device_name
from ..distributed.collectives import all_gather_object, broadcast_object, gather_arithmetic, raise_on_all_ranks
from ..distributed.environment import launcher_id
from ..distributed.world import World
from ..metrics.early_stopping import EarlyStopping
from ..model.identity import ModelIdentity, changed_keys
from ..runs.parse import parse_object
from ..runs.schema import BEST_PREFIX, EVALUATIONS, LOGS, SETTINGS, STEPS
from ..runs.setting_effects import BEST_WEIGHTS, EVERY_STEP
from ..setting_groups import BUILT_IN
from ..settings import Settings
from .find import (
    ResumePoint,
    check_recorded_settings,
    find_checkpoint,
    folder_of_this_job,
    read_run_state,
    read_settings,
)
from .manager import problem_of

LOG_FORMATS = {file.name: file for file in (STEPS, EVALUATIONS)}
# A checkpoint is rejected if one of these settings has another value. The settings of `setting_effects.ROUNDING` may
# have one, which `changes_since` announces.
MUST_BE_EQUAL = (*EVERY_STEP, "load_best_model_at_end")
# With --load_best_model_at_end or --early_stopping_patience, these too. The batch size affects the rounding of the
# scores, and with it the choice between two that are nearly equal.
BEST_SETTINGS = (*BEST_WEIGHTS, "eval_batch_size")


@dataclass(frozen=True)
class Resume:
    """Where a run continues. With nothing set, it starts from the beginning in a new folder."""

    folder: Path | None = None  # the run's own folder, if it exists already
    checkpoint: Path | None = None  # a complete checkpoint, in `folder` or in another run's folder
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

    @property
    def best(self) -> Path | None:
        """The best weights before the checkpoint, if the run kept any."""
        step = self.state.get("best", {}).get("step", 0)
        return self.checkpoint.parent / f"{BEST_PREFIX}{step}" if self.checkpoint and step else None

    def lines_of(self, log: str, before: int | None = None) -> list[str]:
        """Return the lines of a log of the run up to the checkpoint's step; later steps are repeated.

        Args:
            before: the checkpoint's own step, if its evaluation is repeated: the lines end before it.

        Raises:
            UserError: the log is damaged, or a step or an evaluation is missing.
        """
        if self.checkpoint is None:
            return []
        path = self.checkpoint.parent.parent / log
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        kept: list[str] = []
        steps: list[int] = []
        for line in text.splitlines(keepends=True):
            try:
                step = parse_object(line, f"{path}, line {len(kept) + 1}", LOG_FORMATS[log])["step"]
            except UserError as problem:
                if not line.endswith("\n"):
                    break  # the last line, which a killed run had not completed
                raise UserError(f"{problem}, so the run cannot be resumed") from None
            if step > self.step or step == before:
                break
            kept.append(line)
            steps.append(step)
        if log == STEPS.name and steps != list(range(1, self.step + 1)):
            raise UserError(f"{path}: lacks steps before {self.checkpoint}, so the run cannot be resumed from it")
        # A checkpoint is written before the evaluation of its own step, so it counts only the earlier ones. Older
        # versions did not record the number.
        earlier, recorded = sum(step < self.step for step in steps), self.state.get("evaluations") or 0
        if log == EVALUATIONS.name and earlier < recorded:
            raise UserError(f"{path}: lacks evaluations before {self.checkpoint}, so the run cannot be resumed from it")
        return kept


def find_resume(path_name: str, settings: Settings, world: World) -> Resume:
    """Find the checkpoint that `--resume_from_checkpoint` requests, or that this job wrote before it was restarted.

    Collective. The run's own folder, if it exists, is locked before anything in it is looked up, so that no other job
    can add or remove checkpoints after that. If a new run starts from another run's checkpoint, that run is not locked.

    Raises:
        AgreedError: there is no such checkpoint, it is damaged or not visible on every rank, or another job is writing
            to its folder.
        AlreadyFinished: torchrun has restarted a job whose run was complete.
    """
    launchers = sorted({launcher for launcher in all_gather_object(launcher_id(), world) if launcher is not None})
    point = ResumePoint()
    recorded: dict[str, Any] = {}
    # Rank 0 looks for all: another node may see an older state of a network file system.
    with raise_on_all_ranks(world):
        if world.is_main_process:
            # Not only if TORCHELASTIC_RESTART_COUNT is above 0: torchrun does not count the restarts after a node has
            # joined or left.
            own = folder_of_this_job(path_name, settings, launchers)
            point = find_checkpoint(path_name, settings, own=own, warn=world.print_main)
            recorded = read_settings(point.folder) if point.folder else {}
    folder, checkpoint, finished, recorded = broadcast_object(
        (point.folder, point.checkpoint, point.finished, recorded), world
    )
    if finished:
        raise AlreadyFinished(f"{folder}: the run had finished before this restart; nothing is left to do")
    state: dict[str, Any] = {}
    # Every rank reads the checkpoint, so that one that some node does not see is reported now.
    with raise_on_all_ranks(world):
        if checkpoint is not None:
            state = read_run_state(checkpoint)
            # Not from settings.json, which a later start in the same folder may have written.
            recorded = state["settings"] | {"threads": state.get("threads")}
        elif folder is not None:  # the run was stopped before its first checkpoint
            known = {name: value for name, value in recorded.items() if name in settings.as_dict()}
            check_recorded_settings(folder / SETTINGS.name, known)
    changes = changes_since(state, settings, world, arithmetic=gather_arithmetic(world))
    return Resume(folder, checkpoint, state, recorded, point.lock, launchers, changes)


def restore_settings(settings: Settings, resume: Resume, world: World) -> Settings:
    """Fill in the settings that a resumed run takes over unless they are given. Collective.

    Four affect the bits of the results: the number of logical ranks and the number of threads per rank, which
    otherwise depend on the number of processes; the global batch size, which `--per_device_train_batch_size` would
    multiply by it; and the attention implementation, whose default depends on the device. `ddp_find_unused_parameters`
    follows from the model.

    Returns:
        Settings with `logical_ranks`. The number of threads is set for this process.
    """
    recorded = resume.recorded
    # The nodes may have different numbers of cores, but a micro-batch must not depend on the node that computes it.
    default = min(all_gather_object(torch.get_num_threads(), world))
    torch.set_num_threads(settings.threads or recorded.get("threads") or default)
    per_device = settings.per_device_train_batch_size
    if per_device is not None and per_device == recorded.get("per_device_train_batch_size"):
        settings = replace(settings, per_device_train_batch_size=None, train_batch_size=recorded["train_batch_size"])
    # Not with power_sgd, where the setting is invalid. Such a run is rejected later, because another --ddp_comm_hook
    # wrote its checkpoint.
    takes_over = settings.ddp_comm_hook != "power_sgd" and recorded.get("ddp_find_unused_parameters", False)
    return replace(
        settings,
        logical_ranks=settings.logical_ranks or recorded.get("logical_ranks") or world.size,
        # A run that was started on a GPU keeps the GPU's default on a CPU, where the default is another one.
        attn_implementation=settings.attn_implementation or recorded.get("attn_implementation"),
        ddp_find_unused_parameters=settings.ddp_find_unused_parameters or takes_over,
    )


def changes_since(
    state: Mapping[str, Any], settings: Settings, world: World, *, arithmetic: Arithmetic
) -> tuple[str, ...]:
    """List the reasons why a resumed run differs from an uninterrupted one, by rounding or by other dropout masks."""
    recorded = state.get("settings", {})
    # On a CPU, the optimizer is always there.
    offloaded_before = recorded.get("cpu_offload") if world.device.type == "cuda" else None
    before = state.get("arithmetic")  # older checkpoints record the name of rank 0's device only
    # (name, value before, value now). A value before of None was not recorded, or does not matter.
    pairs = [
        *(changes_of_arithmetic(before, arithmetic) if before else []),
        *([] if before else [("device", state.get("device"), device_name(world.device))]),
        ("torch", state.get("torch"), torch.__version__),
        ("transformers", state.get("transformers"), transformers.__version__),
        ("optimizer on the CPU", offloaded_before, settings.cpu_offload),
        ("evaluation batch size", recorded.get("eval_batch_size"), settings.eval_batch_size),
        ("accumulation steps", recorded.get("gradient_accumulation_steps"), settings.gradient_accumulation_steps),
        ("threads per rank", state.get("threads"), settings.threads or state.get("threads")),
    ]
    return tuple(f"{name}: {now}, was {before}" for name, before, now in pairs if before not in (None, now))


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
        fingerprint: the split's.

    Raises:
        UserError: the checkpoint does not fit, and the message lists all differences; or a log or the best weights are
            damaged.
    """
    if resume.checkpoint is None:
        return
    state = resume.state
    # A checkpoint that is older than a setting was trained with the setting's present default.
    recorded = Settings().as_dict() | state["settings"]
    chooses = settings.load_best_model_at_end or settings.early_stopping_patience is not None
    names = [*MUST_BE_EQUAL, *(BEST_SETTINGS if chooses else ())]
    pairs = [
        *((name, recorded.get(name), getattr(settings, name)) for name in names),
        ("total steps", state["total_steps"], total_steps),
        ("split fingerprint", state["fingerprint"][:16], fingerprint[:16]),
        ("path", state["path"], path_name),
    ]
    differences = [f"{name} was {old} and is {new}" for name, old, new in pairs if old != new]
    differences += _differences_in_name(state, recorded["model"], settings.model, commit=model.commit)
    # The settings, classes and rows that are compared above also affect config and tokens.
    if not differences and state.get("model_config") is not None:
        differences = _differences_in_content(state, settings.model, model)
    if differences:
        raise UserError(f"cannot resume from {resume.checkpoint}: {'; '.join(differences)}")
    for log in LOGS:
        resume.lines_of(log)  # raises if a log is damaged
    stopping, patience = EarlyStopping(settings), settings.early_stopping_patience
    stopping.add_all(resume.lines_of(EVALUATIONS.name, before=resume.step))
    if stopping.stops:
        raise UserError(
            f"cannot resume from {resume.checkpoint}: with --early_stopping_patience {patience} the run stops before "
            "it: raise the patience, or resume from an earlier checkpoint"
        )
    if settings.load_best_model_at_end and resume.best is not None and (problem := problem_of(resume.best)):
        raise UserError(f"cannot resume from {resume.checkpoint}: {resume.best}, the best weights before it: {problem}")


def _differences_in_name(state: Mapping[str, Any], before: str, now: str, *, commit: str | None) -> list[str]:
    """Compare names and commits of two models. Of two local folders, only the content counts if it was recorded."""
    differences = []
    recorded_commit = state.get("model_commit")
    built_in = not {before, now}.isdisjoint(BUILT_IN)
    are_folders = not built_in and recorded_commit is None and commit is None  # no commit: not on the Hub
    # Older versions did not record the content. The folder may have been moved since.
    if not are_folders or state.get("model_config") is None:
        names = [str(Path(model).resolve()) if Path(model).is_dir() else model for model in (before, now)]
        if names[0] != names[1]:
            differences.append(f"model was {names[0]} and is {names[1]}")
    if "model_commit" in state and recorded_commit != commit:
        differences.append(
            f"the model's commit was {recorded_commit} and is {commit} (add --revision {recorded_commit})"
        )
    return differences


def _differences_in_content(state: Mapping[str, Any], name: str, model: ModelIdentity) -> list[str]:
    differences = []
    if keys := changed_keys(state["model_config"], model.config or {}):
        differences.append(f"config.json of --model {name} has changed: {', '.join(keys)}")
    if state.get("model_code_sha256") != model.code:
        differences.append(f"the Python code of --model {name} has changed")
    if state.get("tokens_sha256") != model.tokens:
        differences.append(
            f"the tokenizer of --model {name} returns other tokens for the same reviews, or pads differently"
        )
    return differences
