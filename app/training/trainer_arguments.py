"""The settings as arguments of Trainer and of accelerate's DDP."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DistributedDataParallelKwargs
from transformers import TrainingArguments

from app.distributed.world import World
from app.training.prepare import Preparation


def training_arguments(prepared: Preparation, world: World) -> TrainingArguments:
    """Convert the settings to Trainer's arguments."""
    settings, plan, on_cpu = prepared.settings, prepared.plan, world.device.type == "cpu"
    return TrainingArguments(
        output_dir=str(prepared.record.folder),
        per_device_train_batch_size=plan.micro_size,
        per_device_eval_batch_size=settings.eval_batch_size,
        gradient_accumulation_steps=plan.accumulation_steps,
        num_train_epochs=settings.num_train_epochs,
        max_steps=plan.total_steps,
        max_grad_norm=settings.max_grad_norm or float("inf"),
        seed=settings.seed,
        bf16=settings.bf16,
        eval_strategy="no",  # ScheduleCallback decides on both, so that they follow the same steps as in app.ddp_loop
        save_strategy="no",
        logging_strategy="no",  # the record keeps every step's loss; Trainer's log would gather it again
        logging_nan_inf_filter=False,  # it would hide a non-finite loss, and synchronize with the device in each step
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else "nccl",
        ddp_find_unused_parameters=settings.ddp_find_unused_parameters,  # None would mean True
        ddp_bucket_cap_mb=settings.ddp_bucket_cap_mb,
        ddp_timeout=settings.ddp_timeout,
        disable_tqdm=settings.disable_tqdm,
        label_names=["labels"],  # by default every argument of the model's forward that has "label" in its name
        report_to="none",
    )


class DDPArguments(DistributedDataParallelKwargs):  # type: ignore[misc]
    """The arguments that app.ddp_loop gives DDP.

    accelerate omits arguments that equal its own defaults, so a `bucket_cap_mb` of 25 would become DDP's default, None.
    The two differ: only with None does DDP make its first bucket smaller.
    """

    def to_kwargs(self) -> dict[str, Any]:
        return {"find_unused_parameters": self.find_unused_parameters, "bucket_cap_mb": self.bucket_cap_mb}
