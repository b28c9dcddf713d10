"""Prepare a run: everything that happens before the first step, shared by both training paths."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoint.resume import Resume, check_compatible, find_resume
from ..common.errors import AgreedError, UserError
from ..common.machine import Arithmetic, device_name
from ..data.batches import BatchPlan, EvalSet
from ..data.split import describe_duplicates
from ..distributed.collectives import all_gather_object, broadcast_object, gather_arithmetic, raise_on_all_ranks
from ..distributed.world import World
from ..jobs import BLOCKS
from ..metrics.score import load_metrics
from ..model.identity import hash_code
from ..runs.folder import create_folder, lock, reject_used
from ..runs.schema import LOCK, RUNS
from ..settings import Settings
from ..strategies.base import Strategy
from ..strategies.optimization import Loss
from ..tracing import traced
from .build import ReviewData, build_data, build_model, check_equal, select_strategy
from .console import describe_run, quiet_libraries
from .loss import build_loss
from .step import peak_learning_rate

# Settings that may differ between ranks, because they name paths on a machine.
MAY_DIFFER_BETWEEN_RANKS = {"csv", "validation_file", "test_file", "model"}
MAY_DIFFER_BETWEEN_RANKS |= {"cache_dir", "output_dir", "resume_from_checkpoint"}


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A run that is ready for its first step. `RunRecord` writes its files."""

    path_name: str  # the training path, `ddp_loop` or `trainer_run`
    settings: Settings  # with all defaults resolved that depend on the data and the model, such as the learning rate
    world: World
    data: ReviewData
    model: PreTrainedModel
    # The content of the model's files, but not their paths, nor the weights, which a checkpoint holds.
    identity: Mapping[str, Any]
    strategy: Strategy
    loss: Loss
    resume: Resume
    folder: Path
    lock: int | None  # on rank 0, the descriptor that keeps other jobs out of `folder`
    devices: Sequence[str]  # the name of each rank's device
    arithmetic: Arithmetic  # as returned by `gather_arithmetic`

    @cached_property
    def test_set(self) -> EvalSet:
        """The rows that nothing is selected on."""
        return self.data.eval_set("test", self.settings, self.world)

    @cached_property
    def eval_set(self) -> EvalSet:
        """The rows to evaluate during training. Without validation rows, the test rows, for monitoring only."""
        has_validation = len(self.data.split.validation) > 0
        return self.data.eval_set("validation", self.settings, self.world) if has_validation else self.test_set

    @property
    def plan(self) -> BatchPlan:
        return self.data.plan


def prepare(path_name: str, requested: Settings, world: World) -> Preparation:
    """Build the data, the model and the run folder, check that all ranks have the same, and print what will happen.

    Collective.

    Raises:
        AgreedError: a user's mistake on any rank. In that case only the cache may have been written.
    """
    settings, resume = resolve_settings(path_name, requested, world)
    data = build_data(settings, world)
    with raise_on_all_ranks(world):
        check_parts(settings, data)
    classifier = build_model(settings, data, world)
    settings = replace(  # what depends on the data and the model
        settings,
        num_train_epochs=settings.epochs(len(data.split.train)),
        learning_rate=peak_learning_rate(settings),
        attn_implementation=getattr(classifier.model.config, "_attn_implementation", None),
        train_batch_size=data.plan.global_size,
        per_device_train_batch_size=requested.per_device_train_batch_size,
    )
    identity = {  # under the keys of settings.json and run_state.json
        "model_commit": data.commit,
        "model_config": classifier.config,
        "model_code_sha256": hash_code(settings.model, settings.trust_remote_code),
        "tokens_sha256": classifier.tokens_sha256,
    }
    with raise_on_all_ranks(world):
        loss = build_loss(settings, data)
        check_compatible(
            resume,
            settings=settings,
            fingerprint=data.split.fingerprint,
            total_steps=data.plan.total_steps,
            identity=identity,
        )
    strategy = traced(select_strategy(settings, data.plan, world), settings, resume.step, world=world)
    load_metrics()  # now, so that it is not counted as training
    folder, lock_fd = open_folder(path_name, settings, resume, world=world)
    prepared = Preparation(
        path_name=path_name,
        settings=settings,
        world=world,
        data=data,
        model=classifier.model,
        identity=identity,
        strategy=strategy,
        loss=loss,
        resume=resume,
        folder=folder,
        lock=lock_fd,
        devices=all_gather_object(device_name(world.device), world),  # ranks may differ
        arithmetic=gather_arithmetic(world),
    )
    if os.environ.get(BLOCKS) != "none":
        world.print_main(describe_run(prepared, classifier.origin))
    return prepared


def open_folder(path_name: str, settings: Settings, resume: Resume, *, world: World) -> tuple[Path, int | None]:
    """Return the run's folder and, on rank 0, the descriptor that keeps other jobs out of it. Collective.

    Raises:
        AgreedError: the folder cannot be written, another job uses it, or not all ranks see it.
    """
    path, lock_fd = resume.folder, resume.lock
    with raise_on_all_ranks(world):
        if world.is_main_process and path is None:
            path = create_folder(settings.output_dir, RUNS / path_name)
            lock_fd = lock(path)
            reject_used(settings.output_dir)  # another job may have run here and ended between its check and the lock
    path = broadcast_object(lambda: path, world)
    assert path is not None
    needs_all = settings.save_strategy != "no" or settings.load_best_model_at_end or settings.profile
    visible = all_gather_object((path / LOCK).exists(), world)
    if needs_all and not all(visible):
        if world.is_main_process and resume.folder is None:
            (path / LOCK).unlink(missing_ok=True)
            with suppress(OSError):  # a folder that is mounted
                path.rmdir()
        ranks = ", ".join(str(rank) for rank, sees_it in enumerate(visible) if not sees_it)
        raise AgreedError(
            f"--output_dir {path}: rank(s) {ranks} cannot see it: name a folder on a file system that all nodes share, "
            "or turn checkpoints off with --save_strategy no, and do not use --profile"
        )
    return path, lock_fd


def check_parts(settings: Settings, data: ReviewData) -> None:
    """Check the settings that depend on the parts of the data: their sizes, validation rows, and duplicates.

    Raises:
        UserError: a size is given for a part that is published, validation rows are needed but missing, or a text is in
            two parts although --on_duplicates_between_parts is `stop`.
    """
    for part in ("validation", "test"):  # only reading a --dataset_name tells which parts it has
        size = f"{part}_size"
        if part in data.table.parts and getattr(settings, size) != getattr(Settings, size):
            raise UserError(f"--{size} {getattr(settings, size)}: {data.table.path} has {part} rows: remove the flag")
    for name in ("load_best_model_at_end", "early_stopping_patience"):
        if getattr(settings, name) and not len(data.split.validation):
            raise UserError(
                f"--{name}: {data.table.path} has no validation rows to choose on: add --validation_size 0.1"
            )
    if settings.on_duplicates_between_parts == "stop" and (found := describe_duplicates(data.duplicates)):
        raise UserError(f"--on_duplicates_between_parts stop: {found}")


def resolve_settings(path_name: str, settings: Settings, world: World) -> tuple[Settings, Resume]:
    """Return the settings, including those restored from the checkpoint, and where to resume. Collective.

    Raises:
        AgreedError: the ranks have different flags, the checkpoint cannot be used, or the output folder is not empty.
    """
    quiet_libraries(world)
    flags = {f"--{name}": value for name, value in settings.as_dict().items() if name not in MAY_DIFFER_BETWEEN_RANKS}
    check_equal(flags, world, remedy="start every node with the same flags")
    with raise_on_all_ranks(world):
        for name in settings.trackers if world.is_main_process else []:  # the others need no trackers
            if getattr(importlib.util.find_spec(name), "origin", None) is None:  # a folder ./wandb has no origin
                raise UserError(f"--report_to {name}: its package is not installed: run pip install 'samebits[{name}]'")
    resume = find_resume(path_name, settings, world)
    with raise_on_all_ranks(world):
        # Only on rank 0: a lookup by others would make NFS cache that the folder is missing.
        if world.is_main_process and resume.folder is None:
            reject_used(settings.output_dir)
    return restore_settings(settings, resume, world), resume


def restore_settings(settings: Settings, resume: Resume, world: World) -> Settings:
    """Fill in the settings that a resumed run takes over unless they are given. Collective.

    The results depend on them: the number of logical ranks and of threads per rank, which otherwise follow from the
    number of processes; the global batch size, which `--per_device_train_batch_size` would multiply by it; and the
    attention implementation, whose default depends on the device.

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
    return replace(
        settings,
        logical_ranks=settings.logical_ranks or recorded.get("logical_ranks") or world.size,
        attn_implementation=settings.attn_implementation or recorded.get("attn_implementation"),
    )
