"""The settings on which no step of a run depends, or only in a way that a checkpoint records.

A setting that is not listed here must be equal when a run is resumed, and explains a difference between two runs.
"""

from __future__ import annotations

# They do not describe the training at all: names of folders, and settings of output and measurements.
OUTPUT = (
    *("output_dir", "cache_dir", "resume_from_checkpoint", "logging_steps", "disable_tqdm"),
    *("dry_run", "profile", "report_to", "project", "run_name"),
)
# How the ranks share the work, and when checkpoints are saved. Or another recorded value states their effect: the
# split's fingerprint, the model's commit or content, the global batch size, the devices.
WITHOUT_EFFECT = (
    *OUTPUT,
    *("strategy", "activation_checkpointing", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_timeout"),
    *("save_strategy", "save_steps", "save_total_limit", "on_save_failure", "on_duplicates_between_parts"),
    *("csv", "validation_file", "test_file", "dataset_name"),
    *("revision", "trust_remote_code", "per_device_train_batch_size", "use_cpu"),
)
# They choose the rows, the model and the number of steps, which a checkpoint records: those are compared instead.
CHOICES = (
    *("text_column", "label_column", "label_names", "test_size", "validation_size"),
    *("model", "num_train_epochs", "max_steps", "early_stopping_patience", "early_stopping_threshold"),
)
# Another value changes rounding or dropout masks from the step on at which a run is resumed with it.
ROUNDING = ("gradient_accumulation_steps", "threads", "cpu_offload")
# They decide how rows are evaluated, and which weights are the best. That matters only if a run finishes with those, or
# stops early. The batch size affects the rounding of the scores, and with it the choice between nearly equal ones.
BEST_WEIGHTS = ("metric_for_best_model", "eval_strategy", "eval_steps", "eval_batch_size")
