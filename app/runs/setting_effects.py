"""How each setting affects the results of a run. Resuming and comparing runs both follow from these groups.

Each setting is in exactly one of them; a test requires it.
"""

from __future__ import annotations

# Every step depends on them.
EVERY_STEP = (
    *("max_length", "pad_to_multiple_of", "dropout", "attn_implementation", "train_batch_size", "logical_ranks"),
    *("learning_rate", "lr_scheduler_type"),
    *("warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("train_sampling_strategy", "class_weights", "label_smoothing_factor", "seed", "precision", "tf32"),
    *("ddp_comm_hook", "param_dtype", "reduce_dtype", "deterministic"),
)
# They choose the rows, the model and the number of steps, which a checkpoint records: those are compared instead.
CHOICES = (
    *("text_column", "label_column", "label_names", "test_size", "validation_size"),
    *("model", "num_train_epochs", "max_steps", "early_stopping_patience", "early_stopping_threshold"),
)
# Another recorded value states their effect: the split's fingerprint, the model's commit or content, the global batch
# size, the devices.
STATED_ELSEWHERE = (
    *("csv", "validation_file", "test_file", "dataset_name"),
    *("revision", "trust_remote_code", "per_device_train_batch_size", "use_cpu"),
)
# Another value changes rounding or dropout masks from the step on at which a run is resumed with it.
ROUNDING = ("gradient_accumulation_steps", "threads", "cpu_offload")
# They affect which weights are kept and how rows are evaluated, but no step.
AFTER_THE_STEPS = ("load_best_model_at_end", "eval_batch_size")
# They decide which weights are the best, and matter only if a run finishes with those, or stops early.
BEST_WEIGHTS = ("metric_for_best_model", "eval_strategy", "eval_steps")
# How the ranks share the work, and when checkpoints are saved: not a single bit of the results depends on it.
WITHOUT_EFFECT = (
    *("strategy", "activation_checkpointing", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_timeout"),
    *("save_strategy", "save_steps", "save_total_limit", "on_save_failure", "on_duplicates_between_parts"),
)
# They do not describe the training at all: names of folders, and settings of output and measurements.
OUTPUT = (
    *("output_dir", "cache_dir", "resume_from_checkpoint", "logging_steps", "disable_tqdm"),
    *("dry_run", "profile", "report_to", "project", "run_name"),
)
# Settings of earlier versions, which their files contain: `bf16` is true if `precision`, beside it, is "bf16".
FORMER = ("bf16",)
GROUPS = (
    *(EVERY_STEP, CHOICES, STATED_ELSEWHERE, ROUNDING),
    *(AFTER_THE_STEPS, BEST_WEIGHTS, WITHOUT_EFFECT, OUTPUT),
)
