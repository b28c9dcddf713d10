"""The settings of a training run, in the groups in which `--help` lists them, with defaults, types and ranges.

Names follow `transformers.TrainingArguments`, with one deliberate exception: `train_batch_size` is the *global* batch
size, which is divided among ranks and accumulation steps, so that one process and eight train on the same batches.

A setting is declared once: `name: Annotated[type, "help"] = default`. pydantic checks the type and its constraints, and
ignores what it does not know, so other facts about a setting fit into `Annotated`, too. The docstring of a group is its
title in `--help`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from .common.paths import DOWNLOADED_CSV
from .setting_types import (
    TRACKERS,
    Above0,
    AtLeast0,
    ClassWeights,
    Count,
    DType,
    Epochs,
    Fraction,
    LabelNames,
    Length,
    Name,
    Profiled,
    Seed,
    Share,
    Steps,
    Threads,
    Trackers,
    Warmup,
    When,
)

TINY, TINY_BERT = "tiny", "tiny-bert"
BUILT_IN = (TINY, TINY_BERT)  # the models that need no download
RECIPE: dict[str, Any] = {"max_length": 128, "num_train_epochs": 3.0}  # the defaults that depend on the model
RECIPE_OF_TINY: dict[str, Any] = {"max_length": 256, "num_train_epochs": 6.0}  # chosen by cross-validation


@dataclass
class DataSettings:
    """data"""

    csv: Annotated[
        Name | None,
        f"file of reviews: a CSV, JSON Lines (.jsonl, .json) or Parquet (.parquet); default: {DOWNLOADED_CSV.name} if "
        "downloaded, otherwise the bundled sample",
    ] = None
    validation_file: Annotated[Name | None, "file of published validation rows; --csv then has no such rows"] = None
    test_file: Annotated[Name | None, "file of published test rows; --csv then has no such rows"] = None
    dataset_name: Annotated[
        Name | None,
        "data set on the Hugging Face Hub, OWNER/NAME[/CONFIG], or a folder of one, instead of --csv; its splits "
        "train, validation and test are used as published",
    ] = None
    encoding: Annotated[Name | None, "encoding of CSV or JSON files, such as cp949; default: UTF-8 or GB18030"] = None
    on_duplicates_between_parts: Annotated[
        Literal["continue", "stop"],
        "what to do if a text occurs in two of the training, validation and test rows; they are counted and printed",
    ] = "continue"
    text_column: Annotated[Name, "column that contains the text"] = "review"
    label_column: Annotated[Name, "column that contains the class: two or more distinct integers or strings"] = "label"
    label_names: Annotated[
        LabelNames | None,
        "names of the classes in the model's config, predictions and reports, such as 0=negative,1=positive; default: "
        "the labels",
    ] = None
    test_size: Annotated[
        Fraction, "fraction of the rows, between 0 and 1, to hold out as test rows, unless test rows are published"
    ] = 0.1
    validation_size: Annotated[
        Share,
        "fraction of the remaining rows to hold out for monitoring and for choosing the best weights, unless "
        "validation rows are published; 0: none",
    ] = 0.0
    max_length: Annotated[
        Length,
        "maximum number of tokens per review, including special tokens; longer reviews are truncated; default: 128, "
        "for `tiny` 256",
    ] = None  # type: ignore[assignment]
    pad_to_multiple_of: Annotated[
        Count, "pad batches to a multiple of so many tokens: fewer different lengths, for which kernels may be faster"
    ] = 1
    cache_dir: Annotated[
        Name, "folder that caches rows, vocabularies, embeddings and tokens, for all runs; safe to delete"
    ] = "runs/cache"


@dataclass
class ModelSettings:
    """model"""

    model: Annotated[
        Name,
        f"model name on the Hugging Face Hub, local folder, or an untrained model that needs no download: `{TINY}`, a "
        f"ModernBERT with one layer, or `{TINY_BERT}`, a BERT with 2 layers x 128",
    ] = TINY
    revision: Annotated[Name | None, "branch, tag or commit of a model on the Hub; default: its main branch"] = None
    dropout: Annotated[Share | None, "replaces every dropout probability in the model's config"] = None
    attn_implementation: Annotated[
        Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] | None,
        "attention implementation of transformers; default: eager on CPUs, where it is the fastest with dropout or "
        "bf16, otherwise the model's default",
    ] = None
    trust_remote_code: Annotated[bool, "run Python code from the model's repository, if you trust its author"] = False


@dataclass
class TrainingSettings:
    """training (identical in both training paths)"""

    train_batch_size: Annotated[Count, "global batch size: examples per optimizer step, over all ranks"] = 32
    per_device_train_batch_size: Annotated[Count | None, "instead of --train_batch_size: examples of a micro-batch"] = (
        None
    )
    gradient_accumulation_steps: Annotated[
        Count, "accumulation steps (micro-batches) per optimizer step, into which the global batch is divided"
    ] = 1
    logical_ranks: Annotated[
        Count | None,
        "equal shares of the global batch, a power of two; every number of ranks that divides it gives bitwise "
        "identical results; default: the number of ranks, or as in the run to resume",
    ] = None
    num_train_epochs: Annotated[Epochs, "number of passes over the training rows; default: 3, for `tiny` 6"] = None  # type: ignore[assignment]
    max_steps: Annotated[Steps, "total number of optimizer steps, overriding --num_train_epochs; -1: not set"] = -1
    learning_rate: Annotated[Above0 | None, "its peak; default: 2e-5 for pretrained weights, otherwise 1e-3"] = None
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
        Literal["group_by_length", "random"],
        "form batches of reviews of similar length (less padding) or of random reviews",
    ] = "group_by_length"
    class_weights: Annotated[
        ClassWeights | None,
        "weight of each class in the training loss: `balanced` (inversely proportional to its training rows), or one "
        "number per class, such as 1,2.5, in the order of the labels; normalized over the global batch",
    ] = None
    label_smoothing_factor: Annotated[Share, "share of each training label that all classes divide"] = 0.0
    seed: Annotated[Seed, "seed of the split, the initial weights, the data order and dropout"] = 42
    precision: Annotated[
        Literal["fp32", "bf16", "fp16", "fp64", "auto"],
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
        "zero2 and zero3: gather the parameters, with which the model computes, in fp32, as they are, or rounded to "
        "bf16, which needs --precision bf16; shards, optimizer and checkpoints stay in fp32",
    ] = "fp32"
    reduce_dtype: Annotated[
        DType,
        "zero2 and zero3: exchange and sum the gradients of the logical ranks in fp32, as they are, or rounded to bf16",
    ] = "fp32"
    tf32: Annotated[
        bool,
        "GPU: multiply fp32 matrices in TF32, which is faster and rounds their elements to 10 bits after the binary "
        "point; needs compute capability 8.0",
    ] = False
    deterministic: Annotated[
        bool, "GPU: use only deterministic algorithms (slower; fails for operations that have none). CPU: no effect"
    ] = False


@dataclass
class EvaluationSettings:
    """evaluation during training, on the validation rows or, without any, on the test rows (for monitoring only)"""

    eval_strategy: Annotated[When, "when to evaluate"] = "epoch"
    eval_steps: Annotated[Count, "optimizer steps between evaluations with --eval_strategy steps"] = 500
    eval_batch_size: Annotated[Count, "examples per evaluation batch; affects the rounding of scores"] = 64
    positive_class: Annotated[
        Name | None,
        "label or name of the class, of two, whose F1, precision and recall are computed; default: the second class",
    ] = None
    early_stopping_patience: Annotated[
        Count | None,
        "stop training after so many evaluations in a row that did not improve --metric_for_best_model on the "
        "validation rows; default: train all steps",
    ] = None
    early_stopping_threshold: Annotated[AtLeast0, "improvements up to this one do not count for the patience"] = 0.0


@dataclass
class CheckpointSettings:
    """checkpoints and resuming"""

    save_strategy: Annotated[When, "when to save a checkpoint"] = "epoch"
    save_steps: Annotated[Count, "optimizer steps between checkpoints with --save_strategy steps"] = 500
    save_total_limit: Annotated[Count, "number of checkpoints to keep; older ones are deleted"] = 2
    on_save_failure: Annotated[
        Literal["continue", "stop"],
        "continue or stop training if a checkpoint or log cannot be written, for example on a full disk",
    ] = "continue"
    resume_from_checkpoint: Annotated[
        Name | None,
        "checkpoint or run folder to resume from; `auto`: the run in --output_dir or, without it, the latest run",
    ] = None
    load_best_model_at_end: Annotated[
        bool, "finish with the weights that were best on the validation rows instead of the last weights"
    ] = False
    metric_for_best_model: Annotated[
        Literal["accuracy", "f1", "loss"], "metric that determines the best weights (for loss, lower is better)"
    ] = "accuracy"


@dataclass
class ProcessSettings:
    """processes and devices"""

    use_cpu: Annotated[bool, "train on the CPU even if GPUs are available"] = False
    strategy: Annotated[
        Literal["ddp", "zero1", "zero2", "zero3"],
        "state that is sharded over the ranks: none (ddp), the optimizer's (zero1), also gradients, and parameters "
        "between steps (zero2), parameters at any time (zero3); results are bitwise identical",
    ] = "ddp"
    cpu_offload: Annotated[bool, "zero3 on GPUs: keep parameters, gradients and optimizer state in main memory"] = False
    activation_checkpointing: Annotated[
        bool, "recompute the activations of each layer in the backward pass to save memory"
    ] = False
    threads: Annotated[
        Threads,
        "CPU threads per rank, which affect rounding; 0: as in the run to resume, otherwise "
        "the node's cores divided by --logical_ranks or, if not set, by its ranks",
    ] = 0
    ddp_find_unused_parameters: Annotated[
        bool, "let DDP search for parameters without a gradient in every step (slower; some models require it)"
    ] = False
    ddp_bucket_cap_mb: Annotated[Count | None, "size of DDP's gradient buckets in MiB; default: PyTorch's"] = None
    ddp_timeout: Annotated[Count, "seconds that a rank waits for the others before it fails"] = 1800


@dataclass
class OutputSettings:
    """output"""

    output_dir: Annotated[
        Name | None, "folder for the files of the run, which must be new or empty; default: a new folder under runs/"
    ] = None
    logging_steps: Annotated[
        Count, "optimizer steps per logging interval; at its end, losses are averaged over the ranks and logged"
    ] = 10
    report_to: Annotated[Trackers, f"trackers that also get the logs, with commas: {', '.join(TRACKERS)}"] = "none"
    project: Annotated[Name, "project of the trackers"] = "samebits"
    run_name: Annotated[Name | None, "name of the run in the trackers; default: training path and folder"] = None
    disable_tqdm: Annotated[bool, "disable progress bars, which appear only on a terminal"] = False
    dry_run: Annotated[bool, "print the memory and traffic of each rank, and exit before loading weights"] = False
    profile: Annotated[
        Profiled, "training steps to profile, after the first four: writes a trace and where the time goes; 0: none"
    ] = 0
