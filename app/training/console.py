"""The text that a run prints before the first step."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

import datasets
import huggingface_hub
import numpy as np
import torch
import transformers

from ..checkpoint.resume import Resume
from ..common.formats import labeled
from ..common.machine import describe_mixed
from ..common.paths import PACKAGE, SAMPLE_CSV
from ..common.terminal import hides_progress
from ..data.reviews import describe_alike, describe_dropped, sample_rows
from ..data.split import describe_duplicates
from ..data.tokenize import describe_unknown
from ..distributed.collectives import all_gather_object
from ..distributed.world import World
from ..model.inputs import describe_tokenizer_file
from ..model.vocabulary import trimmed_vocabulary
from ..setting_groups import BUILT_IN
from .step import warmup_steps

if TYPE_CHECKING:
    from .prepare import Preparation


def quiet_libraries(world: World) -> None:
    """Turn off the libraries' progress bars and warnings, except those of datasets on rank 0."""
    # transformers imports an installed DeepSpeed, which otherwise looks for GPUs and reports what it finds.
    os.environ["DS_ACCELERATOR"] = world.device.type
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    if hides_progress():
        huggingface_hub.utils.disable_progress_bars()  # type: ignore[attr-defined]
    transformers.logging.set_verbosity_error()  # the startup message names new weights and special tokens
    if not world.is_main_process:
        datasets.logging.set_verbosity_error()


def block(facts: Mapping[str, object]) -> str:
    """Return one `name  value` line per fact, without those that are None or empty."""
    return "\n".join(labeled(name, fact) for name, fact in facts.items() if fact)


def describe_run(prepared: Preparation, origin: str) -> str:
    """Return the block that a run prints before the first step. Collective. `origin` is that of the weights."""
    settings, world, data = prepared.settings, prepared.world, prepared.data
    table, split, plan = data.table, data.split, data.plan
    is_sample = table.path.resolve() == SAMPLE_CSV
    sample = f" (the bundled synthetic sample; {PACKAGE}.data.download fetches real reviews)" if is_sample else ""
    n_train, n_sampled = len(split.train), len(sample_rows(split.train))
    is_sampled = settings.model in BUILT_IN and n_sampled < n_train
    sampled = f"learned from {n_sampled:,} of {n_train:,} training rows" if is_sampled else None
    parts = [("training", split.train), ("validation", split.validation), ("test", split.test)]
    counts = np.bincount(table.labels, minlength=len(table.class_names))
    n_warmup = 0 if settings.lr_scheduler_type == "constant" else warmup_steps(settings.warmup_steps, plan.total_steps)
    n_left_out = n_train - plan.steps_per_epoch * plan.global_size
    n_cut = int((data.lengths == settings.max_length).sum())
    vocabulary = trimmed_vocabulary(prepared.model)
    n_parameters = prepared.model.num_parameters() + (len(vocabulary.unused) * vocabulary.width if vocabulary else 0)
    ranks = all_gather_object(f"{socket.gethostname()}, {world.device}, pid {os.getpid()}", world)
    machine = [
        f"{world.size} x {prepared.devices[0]}",
        f"{torch.get_num_threads()} thread(s) per rank",
        settings.precision,
        settings.strategy,
        f"{settings.attn_implementation or 'default'} attention",
    ]
    facts = {
        "path": prepared.path_name,
        "reviews": ", ".join(filter(None, (f"{table.path}{sample}", *table.notes))),
        "dropped": "; ".join(describe_dropped(table)),
        "rows": " + ".join(f"{len(part)} {name}" for name, part in parts if len(part)),
        "classes": ", ".join(f"{name} ({n:,})" for name, n in zip(table.class_names, counts, strict=True)),
        "alike": describe_alike(table.class_names),
        "duplicates": describe_duplicates(data.duplicates),
        "truncated": f"{n_cut} reviews have --max_length {settings.max_length} tokens, to which longer ones are cut",
        "split": f"seed {settings.seed}, fingerprint {split.fingerprint[:16]}",
        "model": f"{origin}; {n_parameters / 1e6:.1f} M parameters",
        "tokenizer": sampled or describe_tokenizer_file(data.tokenizer, settings, table.texts[:100].tolist()),
        "unknown": describe_unknown(data.rows, data.tokenizer),
        "vocabulary": vocabulary,
        "batch": f"{plan}, {settings.train_sampling_strategy}",
        "steps": f"{plan.total_steps} ({plan.steps_per_epoch} per epoch), including {n_warmup} warmup steps",
        "left out": f"{n_left_out} row(s) of each epoch, which do not fill a batch" if n_left_out else None,
        "warmup": "warmup gives the only step a learning rate of 0" if plan.total_steps == 1 and n_warmup else None,
        "learning rate": f"{settings.learning_rate:g} (AdamW, {settings.lr_scheduler_type} schedule)",
        "machine": ", ".join(machine),
        "files": f"{prepared.folder}/",
        **resume_facts(prepared.resume),
        **{f"rank {rank}": text for rank, text in enumerate(ranks)},
        "warning": describe_mixed(prepared.arithmetic),
    }
    return block(facts)


def resume_facts(resume: Resume) -> dict[str, str | None]:
    """Return the checkpoint that a run resumes from, and the changes since; nothing for a run that starts."""
    if resume.checkpoint is None:
        return {}
    changes = f"{'; '.join(resume.changes)}: not bitwise identical to an uninterrupted run from this step on"
    return {"resumed from": f"{resume.checkpoint} (step {resume.step})", "changed": changes if resume.changes else None}
