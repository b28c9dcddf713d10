"""Every knob, once: the command line, `--config file.yaml` and `settings.json` all come from these dataclasses.

Names are `transformers.TrainingArguments`' where it has one. One exception, on purpose: the training batch is *global*
(`train_batch_size`), divided among ranks and accumulation steps, so that one process and eight train the same thing.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.errors import UserError, shorten

REPOSITORY = Path(__file__).resolve().parents[1]
DOWNLOADED_CSV = REPOSITORY / "data" / "ChnSentiCorp_htl_all.csv"
SAMPLE_CSV = REPOSITORY / "data" / "sample_reviews.csv"
TINY = "tiny"
LARGEST_COUNT = 2**31 - 1  # what every library below takes as a count or a seed
MOST_THREADS = 1024  # OpenMP aborts the process where the system has no more to give


def _is_utf8(path: str | None) -> bool:
    """Whether a path from the command line, where Python keeps other bytes as surrogates, is valid UTF-8."""
    return path is None or path == path.encode("utf-8", "ignore").decode()


def setting(default: Any, help: str) -> Any:
    """A dataclass field with the sentence that `--help` shows for it (argparse reads % as a format)."""
    return field(default=default, metadata={"help": help.replace("%", "%%")})


@dataclass
class DataSettings:
    _argument_group_name = "data: which reviews, and which of them are for training"

    csv: str | None = setting(
        None, f"CSV of reviews; without it data/{DOWNLOADED_CSV.name} if downloaded, else the bundled sample"
    )
    text_column: str = setting("review", "column that holds the text")
    label_column: str = setting("label", "column that holds the class: two or more integers or strings")
    test_size: float = setting(0.1, "share of the rows, between 0 and 1, that is only ever tested on")
    validation_size: float = setting(
        0.0, "share of the training rows set apart for watching and choosing epochs; 0: none"
    )
    max_length: int = setting(128, "longest review in tokens, special tokens included; the rest is cut off")
    cache_dir: str = setting("runs/cache", "where tokens are kept between runs (safe to delete)")


@dataclass
class ModelSettings:
    _argument_group_name = "model: what is trained"

    model: str = setting(TINY, f"name on the Hugging Face Hub, a local folder, or `{TINY}`: a BERT of 2 layers x 128")
    revision: str | None = setting(None, "branch, tag or commit of a model on the Hub; unset: its main branch")
    dropout: float | None = setting(None, "overrides every dropout probability in the model's config")
    trust_remote_code: bool = setting(False, "run Python code that comes with a Hub model: only for authors you trust")


@dataclass
class TrainingSettings:
    _argument_group_name = "training: the recipe, the same on both roads"

    train_batch_size: int = setting(32, "rows an optimizer step, over all ranks and accumulation steps together")
    gradient_accumulation_steps: int = setting(1, "micro-batches that a rank adds up before each optimizer step")
    num_train_epochs: float = setting(3.0, "passes over the training rows")
    max_steps: int = setting(
        -1, "stop after this many optimizer steps, whatever num_train_epochs says; -1: no such limit"
    )
    learning_rate: float | None = setting(None, "peak learning rate; by default 2e-5 for pretrained weights, else 1e-3")
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = setting(
        "linear", "course of the learning rate after warm-up"
    )
    warmup_steps: float = setting(0.1, "steps of linear warm-up; below 1 it is a share of all steps")
    weight_decay: float = setting(0.01, "AdamW's decay of the matrices; biases and norms never decay")
    adam_beta1: float = setting(0.9, "AdamW's decay of the first moment")
    adam_beta2: float = setting(0.999, "AdamW's decay of the second moment")
    adam_epsilon: float = setting(1e-8, "AdamW's epsilon")
    max_grad_norm: float = setting(1.0, "gradients are scaled down to this global norm; 0: never")
    train_sampling_strategy: Literal["group_by_length", "random"] = setting(
        "group_by_length", "which rows meet in a batch: those of like length (little padding), or any"
    )
    seed: int = setting(42, "decides the split, the initial weights, the order of the rows and the dropout")
    precision: Literal["fp32", "bf16", "fp64"] | None = setting(
        None, "fp32, bf16 (autocast; the weights stay fp32) or fp64 (for checking the mathematics); default fp32"
    )
    bf16: bool = setting(False, "the same as --precision bf16")
    deterministic: bool = setting(
        False,
        "GPUs: only deterministic algorithms (slower; an error where an operation has none). CPUs: no effect",
    )


@dataclass
class EvaluationSettings:
    _argument_group_name = (
        "evaluation: on the validation rows if there are any, else on the test rows, for the eye only"
    )

    eval_strategy: Literal["epoch", "steps", "no"] = setting("epoch", "when to evaluate during training")
    eval_steps: int = setting(500, "optimizer steps between two evaluations with --eval_strategy steps")
    eval_batch_size: int = setting(
        64, "rows a rank evaluates at once; changes the padding, and so scores by rounding in the last digits"
    )


@dataclass
class CheckpointSettings:
    _argument_group_name = "checkpoints: what a killed run goes on from"

    save_strategy: Literal["epoch", "steps", "no"] = setting("epoch", "when to write a checkpoint")
    save_steps: int = setting(500, "optimizer steps between two checkpoints with --save_strategy steps")
    save_total_limit: int = setting(2, "checkpoints to keep; the newest are kept")
    on_save_failure: Literal["continue", "stop"] = setting(
        "continue", "whether to train on when a checkpoint or log can't be written, such as on a full disk"
    )
    resume_from_checkpoint: str | None = setting(
        None,
        "folder of a checkpoint or of a run to go on from; `auto`: of the run in --output_dir, or else the latest one",
    )
    load_best_model_at_end: bool = setting(
        False, "end with the weights that were best on the validation rows instead of the last ones"
    )
    metric_for_best_model: Literal["accuracy", "f1", "loss"] = setting(
        "accuracy", "what best means: high, or low for loss"
    )


@dataclass
class ProcessSettings:
    _argument_group_name = "processes: how the ranks work together"

    use_cpu: bool = setting(False, "stay on the CPU (gloo) even where there are GPUs (nccl)")
    threads: int = setting(0, "CPU threads a rank; 0: the machine's cores divided among its ranks")
    ddp_find_unused_parameters: bool = setting(False, "DDP searches each step for parameters without a gradient")
    ddp_bucket_cap_mb: int | None = setting(None, "MiB of gradients that DDP all-reduces at once; unset: DDP's default")
    ddp_timeout: int = setting(1800, "seconds after which a rank that waits for another gives up")


@dataclass
class OutputSettings:
    _argument_group_name = "output: what is shown and kept"

    output_dir: str | None = setting(None, "new or empty folder for the run's files; default: a new one under runs/")
    logging_steps: int = setting(10, "optimizer steps between two all-reduces of the losses and lines in steps.jsonl")
    disable_tqdm: bool = setting(False, "no progress bars")


@dataclass
class Settings(
    OutputSettings,
    ProcessSettings,
    CheckpointSettings,
    EvaluationSettings,
    TrainingSettings,
    ModelSettings,
    DataSettings,
):  # dataclass order is base-last, so the data come first in settings.json
    """What a run is told. `resolve()` has filled in what depends on the machine's files."""

    def __post_init__(self) -> None:
        problems = [message for holds, message in self._rules() if not holds]
        if problems:
            raise UserError("; ".join(problems))
        self.precision = "bf16" if self.bf16 else self.precision or "fp32"
        self.bf16 = self.precision == "bf16"

    def _rules(self) -> list[tuple[bool, str]]:
        """(holds, what is wrong and what would be right) for every number. NaN fails every comparison."""

        def number(name: str, holds: Callable[[Any], bool], right: str) -> tuple[bool, str]:
            value = getattr(self, name)
            # Not math.isfinite, which refuses an int that is too large for a float.
            is_right = value is None or (abs(value) <= sys.float_info.max and holds(value))
            return is_right, f"--{name} {shorten(str(value))}: must be {right}"

        counts = (
            *("train_batch_size", "gradient_accumulation_steps", "eval_steps", "eval_batch_size"),
            *("ddp_bucket_cap_mb", "ddp_timeout", "logging_steps", "save_steps", "save_total_limit"),
        )
        most = f"and at most {LARGEST_COUNT}"
        return [
            number("test_size", lambda share: 0 < share < 1, "a share of the rows between 0 and 1, such as 0.1"),
            number("validation_size", lambda share: 0 <= share < 1, "0 or a share of the training rows below 1"),
            number("max_length", lambda n: 3 <= n <= LARGEST_COUNT, f"3 tokens or more {most}"),
            number("dropout", lambda p: 0 <= p < 1, "a probability: 0 or more and below 1"),
            *(number(name, lambda n: 1 <= n <= LARGEST_COUNT, f"1 or more {most}") for name in counts),
            number("num_train_epochs", lambda n: 0 < n <= LARGEST_COUNT, f"more than 0 {most}"),
            number("max_steps", lambda n: n == -1 or 1 <= n <= LARGEST_COUNT, f"1 or more {most}, or -1 for no limit"),
            number("learning_rate", lambda rate: rate > 0, "a number above 0, such as 2e-5"),
            number("warmup_steps", lambda n: 0 <= n <= LARGEST_COUNT, f"0 or more {most}"),
            number("weight_decay", lambda x: x >= 0, "0 or more"),
            number("adam_beta1", lambda x: 0 <= x < 1, "0 or more and below 1"),
            number("adam_beta2", lambda x: 0 <= x < 1, "0 or more and below 1"),
            number("adam_epsilon", lambda x: x > 0, "above 0"),
            number("max_grad_norm", lambda x: x >= 0, "0 or more"),
            number("seed", lambda x: 0 <= x <= LARGEST_COUNT, f"between 0 and {LARGEST_COUNT}"),
            number("threads", lambda n: 0 <= n <= MOST_THREADS, f"between 0 and {MOST_THREADS}"),
            (not self.bf16 or self.precision in (None, "bf16"), f"--bf16 contradicts --precision {self.precision}"),
            (bool(self.text_column and self.label_column), "--text_column and --label_column must name a column"),
            (
                not self.load_best_model_at_end or (self.validation_size > 0 and self.eval_strategy != "no"),
                "--load_best_model_at_end needs rows to choose on that are no test rows: add --validation_size 0.1 "
                "and an --eval_strategy",
            ),
            (self.revision != "", "--revision is empty: must name a branch, a tag or a commit"),
            (self.output_dir != "", "--output_dir is empty: must name a folder"),
            *(
                (
                    _is_utf8(getattr(self, name)),
                    f"--{name} {getattr(self, name)}: must be UTF-8, as safetensors needs it",
                )
                for name in ("model", "output_dir", "resume_from_checkpoint")
            ),
        ]

    @property
    def csv_path(self) -> Path:
        """The reviews' file: the one asked for, else the real one where it has been downloaded, else the sample."""
        if self.csv is not None:
            return Path(self.csv)
        return DOWNLOADED_CSV if DOWNLOADED_CSV.exists() else SAMPLE_CSV

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


GROUPS = (
    *(DataSettings, ModelSettings, TrainingSettings, EvaluationSettings),
    *(CheckpointSettings, ProcessSettings, OutputSettings),
)
