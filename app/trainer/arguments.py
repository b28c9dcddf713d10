"""Trainer's arguments: those by which it would train differently are off, because the shared objects do that."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

from ..training.prepare import Preparation


class TrainingArgumentsWithoutPlacement(TrainingArguments):
    """Trainer's arguments, except that the strategy places the model on the device."""

    @property
    def place_model_on_device(self) -> bool:
        """Trainer would place the complete model there, before the strategy shards it."""
        return False


def training_arguments(prepared: Preparation, **more: Any) -> TrainingArguments:
    settings, plan, on_cpu = prepared.settings, prepared.plan, prepared.world.device.type == "cpu"
    return TrainingArgumentsWithoutPlacement(
        output_dir=str(prepared.folder),
        per_device_train_batch_size=plan.micro_size,
        per_device_eval_batch_size=settings.eval_batch_size,
        gradient_accumulation_steps=plan.micro_batches_per_step,
        max_steps=plan.total_steps,
        max_grad_norm=settings.max_grad_norm or float("inf"),
        seed=settings.seed,
        eval_strategy="no",  # the record decides on both, so that they follow the same steps as in app.ddp_loop
        save_strategy="no",
        logging_strategy="no",  # the record keeps every step's loss; Trainer's log would gather it again
        logging_nan_inf_filter=False,  # it would hide a non-finite loss, and synchronize with the device in each step
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else "nccl",
        ddp_timeout=settings.ddp_timeout,
        disable_tqdm=True,  # the record shows the progress bar
        label_names=["labels"],  # by default every argument of the model's forward that has "label" in its name
        report_to="none",
        **more,
    )
