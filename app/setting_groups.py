"""The settings of a training run, in the groups in which `--help` lists them, with defaults, types and ranges.

Most names are those of `transformers.TrainingArguments`. Batch sizes are not: `train_batch_size` is the *global* batch
size, which is divided among ranks and accumulation steps, so that one process and eight train on the same batches.

A setting is declared once: `name: Annotated[type, "help"] = default`, with the fact `EVERYDAY` if most users need it:
`--help` lists only these, `--help_all` lists all. pydantic checks the type and its constraints, and ignores what it
does not know, so other facts about a setting fit into `Annotated`, too. The docstring of a group is its title.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from .common.paths import DOWNLOADED_CSV

EVERYDAY = object()
TRACKERS = ("tensorboard", "trackio", "wandb", "mlflow", "swanlab")
MAX_THREADS = 1024  # OpenMP aborts the process if the system cannot provide the requested threads
MAX_PROFILED = 1000  # steps: the trace of one has some ten thousand events
LARGEST_COUNT = 2**31 - 1  # every library used here accepts counts and seeds up to this value
TINY, TINY_BERT = "tiny", "tiny-bert"
BUILT_IN = (TINY, TINY_BERT)  # the models that need no download
# Selected on held-out training rows, by accuracy: 12 epochs instead of 6 changed it by +1.3, +1.5 and -0.5 points with
# 400, 800 and 1,600 real reviews, by +4.0 with 1,600 of the sample. The log loss was higher each time (docs/train.md).
FEW_ROWS = 2_500  # with fewer training rows, `tiny` trains for 12 epochs. Between 1,600 and 7,000, none were measured


def check_name(text: str) -> str:
    if not text:
        raise ValueError("must not be empty (an unset shell variable is)")
    if text != text.encode("utf-8", "ignore").decode():
        raise ValueError("must be valid UTF-8, which safetensors and JSON require")
    return text


def check_class_weights(text: str) -> str:
    # fp32 holds these, and their sums over a batch.
    if text != "balanced" and not all(1e-30 < weight < 1e30 for weight in map(float, text.split(","))):
        raise ValueError("must be `balanced`, or one number above 0 per class, such as 1,2.5")
    return text


def check_label_names(text: str) -> str:
    names = split_label_names(text)
    if not names or "" in {*names, *names.values()} or len(names) <= text.count(","):
        raise ValueError("must name each label once, such as 0=bad,1=good")
    return text


def check_trackers(text: str) -> str:
    if not {name.strip() for name in text.split(",")} <= {"none", *TRACKERS}:
        raise ValueError(f"must be one or more of none, {', '.join(TRACKERS)}")
    return text


def check_traced(text: str) -> str:
    steps = [int(number) for number in text.split(":") if re.fullmatch("[1-9][0-9]{0,8}", number)]
    if text.count(":") != 1 or len(steps) != 2 or steps[0] > steps[1]:
        raise ValueError("must be two steps FROM:TO, counted from 1, such as 11:12")
    return text


def split_label_names(text: str) -> dict[str, str]:
    """Return the names in a text such as `0=negative,1=positive`, by label."""
    pairs = [pair.partition("=") for pair in text.split(",")] if text else []
    return {label.strip(): name.strip() for label, _, name in pairs}


Name = Annotated[str, AfterValidator(check_name)]
ClassWeights = Annotated[str, AfterValidator(check_class_weights)]
LabelNames = Annotated[str, AfterValidator(check_label_names)]
Traced = Annotated[str, AfterValidator(check_traced)]
Trackers = Annotated[str, AfterValidator(check_trackers)]
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Length = Annotated[int, Field(ge=3, le=LARGEST_COUNT)]  # a text has at least one token and the two special ones
Seed = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Steps = Annotated[int, Field(ge=-1, le=LARGEST_COUNT)]
Epochs = Annotated[float, Field(gt=0, le=LARGEST_COUNT)]
Warmup = Annotated[float, Field(ge=0, le=LARGEST_COUNT)]
Threads = Annotated[int, Field(ge=0, le=MAX_THREADS)]
Profiled = Annotated[int, Field(ge=0, le=MAX_PROFILED)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeast0 = Annotated[float, Field(ge=0, allow_inf_nan=False)]
When = Literal["epoch", "steps", "no"]
DType = Literal["fp32", "bf16"]


@dataclass
class DataSettings:
    """data"""

    csv: Annotated[
        Name | None,
        EVERYDAY,
        f"file of texts: CSV, JSON Lines (.jsonl, .json) or Parquet (.parquet); default: {DOWNLOADED_CSV.name} if "
        "downloaded, otherwise the bundled sample",
    ] = None
    validation_file: Annotated[Name | None, "file of published validation rows; --csv then has no such rows"] = None
    test_file: Annotated[Name | None, "file of published test rows; --csv then has no such rows"] = None
    dataset_name: Annotated[
        Name | None,
        EVERYDAY,
        "data set on the Hugging Face Hub, OWNER/NAME[/CONFIG], or a folder of one, instead of --csv; its splits "
        "train, validation and test are used as published",
    ] = None
    encoding: Annotated[
        Name | None, "encoding of files that are not UTF-8, such as cp949; default: UTF-8 (CSV: or GB18030)"
    ] = None
    on_duplicates_between_parts: Annotated[
        Literal["continue", "stop"], "what to do if a text is in two of the training, validation and test rows"
    ] = "continue"
    text_column: Annotated[Name, EVERYDAY, "column that contains the text"] = "review"
    label_column: Annotated[Name, EVERYDAY, "column that contains the class, as an integer or a string"] = "label"
    label_names: Annotated[LabelNames | None, EVERYDAY, "class names, as in 0=bad,1=good; default: the labels"] = None
    test_size: Annotated[Fraction, EVERYDAY, "fraction of the rows to hold out as test rows"] = 0.1
    validation_size: Annotated[Share, EVERYDAY, "fraction of the rest to hold out for choosing the best weights"] = 0.0
    max_length: Annotated[Length, EVERYDAY, "tokens per text; the rest is cut; default: 128, `tiny`: 256"] = None  # type: ignore[assignment]
    pad_to_multiple_of: Annotated[Count, "pad batches to a multiple of N tokens, for which kernels may be faster"] = 1
    cache_dir: Annotated[Name, "folder that caches rows, embeddings and tokens; safe to delete"] = "runs/cache"


@dataclass
class ModelSettings:
    """model"""

    model: Annotated[
        Name,
        EVERYDAY,
        f"model name on the Hugging Face Hub, local folder, or an untrained model that needs no download: `{TINY}`, a "
        f"ModernBERT with one layer, or `{TINY_BERT}`, a BERT with 2 layers x 128",
    ] = TINY
    revision: Annotated[Name | None, "branch, tag or commit of a model on the Hub; default: its main branch"] = None
    dropout: Annotated[Share | None, EVERYDAY, "replaces every dropout probability in the model's config"] = None
    attn_implementation: Annotated[
        Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] | None,
        "attention implementation of transformers; default: eager on CPUs, otherwise the model's default",
    ] = None
    trust_remote_code: Annotated[bool, "run Python code from the model's repository, if you trust its author"] = False


@dataclass
class TrainingSettings:
    """training (identical in both training paths)"""

    train_batch_size: Annotated[Count, EVERYDAY, "global batch size: examples per optimizer step, over all ranks"] = 32
    per_device_train_batch_size: Annotated[Count | None, "instead of --train_batch_size: rows per micro-batch"] = None
    gradient_accumulation_steps: Annotated[Count, EVERYDAY, "micro-batches that a global batch is divided into"] = 1
    logical_ranks: Annotated[
        Count | None,
        EVERYDAY,
        "equal shares of the global batch, a power of two; every number of ranks that divides it gives bitwise "
        "identical results; default: the number of ranks, or as in the run to resume",
    ] = None
    num_train_epochs: Annotated[
        Epochs | None, EVERYDAY, f"passes over the training rows; default: 3, `tiny`: 6, or 12 below {FEW_ROWS:,} rows"
    ] = None
    max_steps: Annotated[Steps, EVERYDAY, "number of optimizer steps instead of --num_train_epochs; -1: not set"] = -1
    learning_rate: Annotated[Above0 | None, EVERYDAY, "peak; default: 2e-5 for pretrained weights, else 1e-3"] = None
    lr_scheduler_type: Annotated[
        Literal["linear", "cosine", "constant", "constant_with_warmup"], "learning rate schedule after warmup"
    ] = "linear"
    warmup_steps: Annotated[Warmup, "optimizer steps of linear warmup; below 1: a fraction of all steps"] = 0.1
    weight_decay: Annotated[AtLeast0, "AdamW's weight decay; biases and normalization weights are exempt"] = 0.01
    adam_beta1: Annotated[Share, "AdamW's beta1"] = 0.9
    adam_beta2: Annotated[Share, "AdamW's beta2"] = 0.999
    adam_epsilon: Annotated[Above0, "AdamW's epsilon"] = 1e-8
    max_grad_norm: Annotated[AtLeast0, "clip gradients to this global norm; 0: no clipping"] = 1.0
    train_sampling_strategy: Annotated[
        Literal["group_by_length", "random"], "batches of texts of similar length (less padding) or of random texts"
    ] = "group_by_length"
    class_weights: Annotated[
        ClassWeights | None,
        "weight of each class in the training loss: `balanced` (inversely proportional to its training rows), or one "
        "number per class, such as 1,2.5, in the order of the labels; normalized over the global batch",
    ] = None
    label_smoothing_factor: Annotated[Share, "share of each training label that all classes divide"] = 0.0
    seed: Annotated[Seed, EVERYDAY, "seed of the split, the initial weights, the data order and dropout"] = 42
    precision: Annotated[
        Literal["fp32", "bf16", "fp16", "fp64", "auto"],
        EVERYDAY,
        "fp32, bf16 or fp16 (autocast; weights stay in fp32; fp16 with loss scaling), fp64 (for numerical checks), or "
        "auto: bf16 on hardware that has instructions for it, otherwise fp32",
    ] = "fp32"
    ddp_comm_hook: Annotated[
        Literal["no", "fp16", "bf16", "power_sgd"],
        "ddp and zero1: compress the gradients that the ranks exchange, by rounding them to fp16 or bf16, or with "
        "PowerSGD, whose results depend on the number of ranks",
    ] = "no"
    param_dtype: Annotated[
        DType,
        "zero2 and zero3: gather the parameters as they are (fp32), or rounded to bf16, which needs --precision bf16; "
        "shards, optimizer and checkpoints stay in fp32",
    ] = "fp32"
    reduce_dtype: Annotated[
        DType, "zero2 and zero3: exchange and sum gradients of the logical ranks as they are (fp32), or rounded to bf16"
    ] = "fp32"
    tf32: Annotated[bool, "GPU (compute capability 8.0): multiply fp32 matrices in TF32: faster, less accurate"] = False
    deterministic: Annotated[bool, EVERYDAY, "GPU: only deterministic algorithms (slower; fails if there is none)"] = (
        False
    )


@dataclass
class EvaluationSettings:
    """evaluation during training, on the validation rows or, without any, on the test rows (for monitoring only)"""

    eval_strategy: Annotated[When, "when to evaluate"] = "epoch"
    eval_steps: Annotated[Count, "optimizer steps between evaluations with --eval_strategy steps"] = 500
    eval_batch_size: Annotated[Count, "examples per evaluation batch; affects the rounding of scores"] = 64
    positive_class: Annotated[Name | None, "of two classes, that of F1, precision and recall; default: the second"] = (
        None
    )
    early_stopping_patience: Annotated[
        Count | None,
        "stop training after N evaluations without improvement of --metric_for_best_model on the validation rows; "
        "default: train all steps",
    ] = None
    early_stopping_threshold: Annotated[AtLeast0, "improvements up to this one do not count for the patience"] = 0.0


@dataclass
class CheckpointSettings:
    """checkpoints and resuming"""

    save_strategy: Annotated[When, EVERYDAY, "when to save a checkpoint"] = "epoch"
    save_steps: Annotated[Count, EVERYDAY, "optimizer steps between checkpoints with --save_strategy steps"] = 500
    save_total_limit: Annotated[Count, "number of checkpoints to keep; older ones are deleted"] = 2
    on_save_failure: Annotated[
        Literal["continue", "stop"], "what to do if a checkpoint or log cannot be written, as on a full disk"
    ] = "continue"
    resume_from_checkpoint: Annotated[
        Name | None,
        EVERYDAY,
        "checkpoint or run folder to resume from; `auto`: the run in --output_dir or, without it, the latest run",
    ] = None
    load_best_model_at_end: Annotated[bool, "finish with the weights that were best on the validation rows"] = False
    metric_for_best_model: Annotated[Literal["accuracy", "f1", "loss"], "for choosing the best weights"] = "accuracy"


@dataclass
class ProcessSettings:
    """processes and devices"""

    use_cpu: Annotated[bool, "train on the CPU even if GPUs are available"] = False
    strategy: Annotated[
        Literal["ddp", "zero1", "zero2", "zero3"],
        EVERYDAY,
        "state that is sharded over the ranks: none (ddp), the optimizer's (zero1), also gradients, and parameters "
        "between steps (zero2), parameters at any time (zero3); results are bitwise identical",
    ] = "ddp"
    cpu_offload: Annotated[bool, "zero3 on GPUs: keep parameters, gradients and optimizer state in main memory"] = False
    activation_checkpointing: Annotated[bool, "recompute activations in the backward pass to save memory"] = False
    threads: Annotated[
        Threads,
        "CPU threads per rank, which affect rounding; 0: as in the run to resume, otherwise "
        "the node's cores divided by --logical_ranks or, if not set, by its ranks",
    ] = 0
    ddp_find_unused_parameters: Annotated[bool, "let DDP find parameters without a gradient in each step"] = False
    ddp_bucket_cap_mb: Annotated[Count | None, "size of DDP's gradient buckets in MiB; default: PyTorch's"] = None
    ddp_timeout: Annotated[Count, "seconds that a rank waits for the others before it fails"] = 1800


@dataclass
class OutputSettings:
    """output"""

    output_dir: Annotated[Name | None, EVERYDAY, "new or empty folder for the run; default: a new one in runs/"] = None
    logging_steps: Annotated[Count, "optimizer steps per logging interval, after which losses are averaged"] = 10
    report_to: Annotated[Trackers, EVERYDAY, f"trackers to log to, with commas: {', '.join(TRACKERS)}"] = "none"
    project: Annotated[Name, "project of the trackers"] = "samebits"
    run_name: Annotated[Name | None, "name of the run in the trackers; default: training path and folder"] = None
    disable_tqdm: Annotated[bool, "disable progress bars, which appear only on a terminal"] = False
    dry_run: Annotated[bool, "print the memory and traffic of each rank, and exit before loading weights"] = False
    profile: Annotated[Profiled, "steps to profile, after the first four: a trace, and where the time goes"] = 0
    trace_tensors: Annotated[
        Traced | None,
        "first and last optimizer step, such as 11:12: tensors.jsonl gets a hash and a norm of each of their tensors: "
        "outputs of modules, gradients, parameters and moments; default: no steps",
    ] = None
