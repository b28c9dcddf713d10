"""What a run prints: its first and last lines, and how quiet the libraries are."""

from __future__ import annotations

from pathlib import Path

import datasets
import torch
import transformers

from app.data.csv_table import ReviewTable, describe_dropped
from app.data.sampler import BatchPlan
from app.data.split import Split
from app.distributed.world import World
from app.errors import escape_control_characters
from app.metrics.score import Scores
from app.model.load import Classifier
from app.runs.record import RunRecord
from app.runs.resume import Resume
from app.settings import SAMPLE_CSV, Settings
from app.training.optim import warmup_steps


def quiet_libraries(world: World) -> None:
    """Libraries' own bars and warnings: none from the ranks that nobody reads."""
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    if not world.is_main_process:
        transformers.logging.set_verbosity_error()
        datasets.logging.set_verbosity_error()


def start_up_block(
    path_name: str,
    settings: Settings,
    table: ReviewTable,
    split: Split,
    plan: BatchPlan,
    classifier: Classifier,
    folder: Path,
    world: World,
    resume: Resume,
    commit: str | None,
) -> str:
    """What will happen, in a few lines."""
    validation = f"{len(split.validation)} validation + " if len(split.validation) else ""
    default = (
        "" if table.path != SAMPLE_CSV else " (the bundled synthetic sample; see data/README.md for the real file)"
    )
    warmup = warmup_steps(settings, plan.total_steps)
    classes = ", ".join(table.class_names)
    weights = "pretrained weights" if classifier.pretrained else "weights initialised here"
    parameters = classifier.model.num_parameters() / 1e6
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    lines = [
        ("road", path_name),
        ("reviews", f"{table.path}{default}"),
        *(("dropped", line) for line in describe_dropped(table)),
        (
            "rows",
            f"{len(split.train)} training + {validation}{len(split.test)} test; classes {classes}",
        ),
        ("split", f"seed {settings.seed}, fingerprint {split.fingerprint[:16]}"),
        ("model", f"{classifier.origin}{f' at {commit[:12]}' if commit else ''}; {parameters:.1f} M parameters"),
        ("batch", f"{plan}, {settings.train_sampling_strategy}"),
        (
            "steps",
            f"{plan.total_steps} ({plan.steps_per_epoch} an epoch), {warmup} of warm-up",
        ),
        ("learning rate", f"{settings.learning_rate:g} (AdamW, {settings.lr_scheduler_type}; {weights})"),
        ("machine", f"{world.size} x {device}, {torch.get_num_threads()} thread(s) a rank, {settings.precision}"),
        ("files", f"{folder}/"),
    ]
    if resume.checkpoint is not None:
        lines += [("resumed from", f"{resume.checkpoint} (step {resume.step})")]
        if resume.changes:
            changes = "; ".join(resume.changes)
            lines += [("changed", f"{changes}: the same batches, but other dropout masks from here on")]
        threads, before = torch.get_num_threads(), resume.state.get("threads")
        if before not in (None, threads):
            lines += [
                ("changed", f"threads per rank: {threads}, was {before}: sums are rounded differently from here on")
            ]
    return "\n".join(f"{name:>14}  {escape_control_characters(text)}" for name, text in lines)


def closing_block(scores: Scores, record: RunRecord) -> str:
    """What came out, and where it is."""
    right = round(scores.accuracy * scores.n)
    lines = [
        ("test accuracy", f"{scores.accuracy:.4f} ({right} of {scores.n} reviews), F1 {scores.f1:.4f}"),
        (
            "training took",
            f"{record.totals.train_seconds:.1f} s, {record.totals.examples_per_second:.0f} reviews a second",
        ),
        ("model", f"{record.model_folder}/"),
    ]
    return "\n".join(f"{name:>14}  {escape_control_characters(text)}" for name, text in lines)
