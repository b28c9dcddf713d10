"""Hints for flags of `TrainingArguments`, of example scripts and of launchers that this project does not have.

Spelling similarity alone would mislead: `--per_device_eval_batch_size` resembles `--per_device_train_batch_size`. These
flags are therefore looked up before similar names are suggested.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from .paths import PACKAGE

_HINTS: dict[tuple[str, ...], str] = {
    # data
    ("train_file", "test_file", "data_path", "data_file", "input_file", "csv_file", "data"): (
        "use --csv; test rows are split off with --test_size"
    ),
    ("validation_file", "eval_file", "dev_file"): "use --csv; validation rows are split off with --validation_size",
    ("dataset_name", "dataset_config_name", "dataset", "task_name", "data_dir"): (
        "datasets are read from a CSV file: use --csv"
    ),
    ("text_column_name", "text_column_names", "sentence1_key"): "use --text_column",
    ("label_column_name", "label_names"): "use --label_column",
    ("max_seq_length", "max_seq_len", "max_len", "block_size"): "use --max_length",
    ("pad_to_max_length", "pad_to_multiple_of"): "batches are always padded to their longest review",
    ("max_train_samples", "max_eval_samples", "max_val_samples", "max_predict_samples"): (
        "all rows are used: give a smaller file with --csv, or fewer steps with --max_steps"
    ),
    ("overwrite_cache",): "the token cache detects changes by itself; its folder, --cache_dir, is safe to delete",
    ("num_workers", "dataloader_num_workers", "preprocessing_num_workers", "dataloader_pin_memory"): (
        "reviews are tokenized once and memory-mapped, so data loading needs no worker processes"
    ),
    ("dataloader_drop_last",): "the incomplete last batch of an epoch is always dropped",
    ("group_by_length", "length_column_name"): "use --train_sampling_strategy group_by_length (the default)",
    # model
    ("model_name_or_path", "model_name", "model_path", "model_id", "pretrained_model_name_or_path", "model_type"): (
        "use --model"
    ),
    ("tokenizer_name", "tokenizer", "config_name", "use_fast_tokenizer"): "config and tokenizer come with --model",
    ("model_revision",): "use --revision",
    ("token", "hub_token", "use_auth_token"): "log in with `hf auth login`, or set HF_TOKEN",
    ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"): "use --dropout, which sets them all",
    ("ignore_mismatched_sizes",): "a classification head of another size is always replaced",
    ("attn_implementation",): "the model's default attention implementation is used",
    # training
    ("batch_size", "bs", "per_gpu_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu"): (
        "use --train_batch_size for the global batch size or --per_device_train_batch_size for the size per rank"
    ),
    ("auto_find_batch_size",): (
        "not supported; if memory runs out, raise --gradient_accumulation_steps, or see --strategy"
    ),
    ("epochs", "epoch", "num_epochs", "n_epochs", "max_epochs"): "use --num_train_epochs",
    ("max_train_steps", "num_steps", "steps", "max_iters"): "use --max_steps",
    ("lr", "base_lr", "max_lr"): "use --learning_rate",
    ("scheduler", "lr_scheduler"): "use --lr_scheduler_type",
    ("lr_scheduler_kwargs",): "not supported; see --lr_scheduler_type and --warmup_steps",
    ("warmup_ratio", "warmup_proportion", "num_warmup_steps", "warmup"): (
        "use --warmup_steps; a value below 1 is a fraction of all steps"
    ),
    ("optim", "optimizer", "adafactor", "optim_args"): (
        "the optimizer is always AdamW; see --adam_beta1, --adam_beta2, --adam_epsilon and --weight_decay"
    ),
    ("clip_grad", "grad_clip", "gradient_clipping", "clip_grad_norm"): "use --max_grad_norm",
    ("accumulation_steps", "grad_accum", "grad_accum_steps", "accumulate_grad_batches"): (
        "use --gradient_accumulation_steps"
    ),
    ("gradient_checkpointing", "gradient_checkpointing_kwargs", "checkpoint_activations"): (
        "use --activation_checkpointing"
    ),
    ("label_smoothing", "label_smoothing_factor", "neftune_noise_alpha"): "not supported",
    ("data_seed", "random_seed"): "use --seed, which also determines the data order",
    ("full_determinism",): "use --deterministic",
    # precision and speed
    ("fp16", "fp16_opt_level", "fp16_backend", "half_precision_backend", "amp"): (
        "use --precision fp16, or bf16, which needs no loss scaling"
    ),
    ("mixed_precision", "dtype", "torch_dtype"): "use --precision",
    ("bf16_full_eval", "fp16_full_eval"): "evaluation uses the training precision; see --precision",
    ("tf32",): "fp32 matrix products never use TF32; for speed use --precision bf16",
    ("torch_compile", "torch_compile_backend", "torch_compile_mode", "compile"): "torch.compile is not supported",
    # evaluation, checkpoints and output
    ("do_train", "do_eval", "do_predict", "eval_on_start"): (
        "every run trains, evaluates and predicts the test rows; see --eval_strategy"
    ),
    ("evaluation_strategy", "evaluate_during_training"): "use --eval_strategy",
    ("per_device_eval_batch_size", "per_gpu_eval_batch_size", "test_batch_size"): ("use --eval_batch_size"),
    ("early_stopping_patience", "early_stopping", "patience"): (
        "not supported; --load_best_model_at_end with --validation_size keeps the best weights"
    ),
    ("greater_is_better",): "it follows from --metric_for_best_model",
    ("resume", "checkpoint", "ckpt", "resume_from"): "use --resume_from_checkpoint",
    ("overwrite_output_dir",): "existing runs are never overwritten; choose a new or empty --output_dir",
    ("output", "out_dir", "save_dir", "output_path", "run_name", "logging_dir"): (
        "use --output_dir, which receives logs, checkpoints and the model"
    ),
    ("report_to", "logging_strategy", "logging_first_step", "with_tracking"): (
        "every step is logged to steps.jsonl in --output_dir; see --logging_steps"
    ),
    ("log_level", "log_level_replica"): "not supported; see --disable_tqdm",
    ("push_to_hub", "hub_model_id", "hub_strategy"): ("after training, upload the run's model folder with `hf upload`"),
    ("save_safetensors", "save_only_model"): "the model is always saved as safetensors, checkpoints always in full",
    # processes
    (
        "no_cuda",
        "cpu",
        "use_mps_device",
        "device",
    ): "CUDA GPUs are used if there are any, otherwise the CPU, also on a Mac; --use_cpu always uses the CPU",
    ("gpus", "devices", "gpu", "gpu_ids", "n_gpu"): (
        "select GPUs with CUDA_VISIBLE_DEVICES and start one process per GPU with torchrun --nproc_per_node"
    ),
    ("local_rank",): "torchrun passes the rank in the environment; use torchrun instead of torch.distributed.launch",
    ("nproc_per_node", "nnodes", "node_rank", "num_processes", "master_addr", "master_port", "standalone"): (
        f"flags of the launcher go before the module: torchrun --nproc_per_node=2 -m {PACKAGE}.ddp_loop"
    ),
    ("ddp_backend", "backend"): "NCCL is used on GPUs and gloo on CPUs",
    ("comm_hook", "ddp_comm_wrapper", "gradient_compression", "powersgd", "power_sgd"): "use --ddp_comm_hook",
    ("ddp_broadcast_buffers", "ddp_static_graph"): "not supported; DDP's defaults are used",
    # strategies
    ("fsdp_config", "fsdp_sharding_strategy", "sharding_strategy", "fsdp_reshard_after_forward", "use_fsdp"): (
        "use --strategy zero2 or --strategy zero3, which are FSDP2"
    ),
    ("zero_stage", "zero", "zero1", "zero2", "zero3", "sharded_ddp"): "use --strategy zero1, zero2 or zero3",
    ("deepspeed_config", "use_deepspeed", "deepspeed_config_file", "zero3_init_flag"): (
        f"use --deepspeed with {PACKAGE}.trainer_run, or --strategy zero1, zero2 or zero3"
    ),
    ("offload", "fsdp_offload_params", "offload_optimizer", "offload_optimizer_device", "offload_param_device"): (
        "use --strategy zero3 --cpu_offload"
    ),
    ("accelerator_config", "parallelism_config"): "not supported; see --strategy",
}
_HINT_OF_FLAG = {flag: hint for flags, hint in _HINTS.items() for flag in flags}


def hint_for(argument: str, flags: Collection[str]) -> str | None:
    """Suggest what to use instead of an unknown argument.

    Args:
        argument: As on the command line, such as `--lr=1e-3`.
        flags: The names of the program's flags, without leading dashes and with underscores.

    Returns:
        A short hint, or None if nothing is known about the argument and no existing flag resembles it.
    """
    if not argument.startswith("-"):
        return None
    name = argument.partition("=")[0].lstrip("-").replace("-", "_")
    if name in _HINT_OF_FLAG:
        return _HINT_OF_FLAG[name]
    similar = difflib.get_close_matches(name, flags, n=1, cutoff=0.75)
    return f"did you mean --{similar[0]}?" if similar else None
