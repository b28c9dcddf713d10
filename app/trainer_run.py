"""The same fine-tuning through transformers.Trainer: same rows, order, weights, optimizer and schedule as app.ddp_loop.

    torchrun --nproc_per_node=2 -m app.trainer_run
    torchrun -m app.trainer_run
    python -m app.trainer_run --csv reviews.csv --text_column text --model bert-base-chinese

What is ours in it is small, and each override says what would differ without it. The rest is Trainer as everyone knows
it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import (
    EvalPrediction,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import EvalLoopOutput

from app.checkpoint.state import build_buckets, read_training_state, read_weights, write_training_state
from app.cli import launch
from app.distributed.collectives import broadcast_buffers, gather_rows
from app.distributed.preemption import StopRequest
from app.distributed.process_group import join
from app.distributed.world import World
from app.metrics.score import Scores, score
from app.settings import Settings
from app.strategies.ddp import DDP
from app.training.console import closing_block
from app.training.optim import build_optimizer, build_scheduler
from app.training.prepare import Preparation, prepare


def main(settings: Settings) -> None:
    with join(settings) as world:
        fine_tune(settings, world)


def fine_tune(settings: Settings, world: World) -> None:
    prepared = prepare("trainer_run", settings, world)
    with StopRequest(world) as stop, prepared.record.locate_failures():
        scores = train_and_test(prepared, settings, world, stop)
    world.print_main(closing_block(scores, prepared.record))


def train_and_test(prepared: Preparation, settings: Settings, world: World, stop: StopRequest) -> Scores:
    optimizer = build_optimizer(prepared.model, settings, prepared.learning_rate)
    trainer = ReviewTrainer(
        prepared,
        world,
        model=prepared.model,
        args=training_arguments(prepared, settings),
        data_collator=prepared.collator,
        train_dataset=prepared.train_rows,
        eval_dataset=prepared.watched_loader.dataset,
        processing_class=prepared.tokenizer,
        compute_metrics=compute_metrics,
        optimizers=(optimizer, build_scheduler(optimizer, settings, prepared.plan.total_steps)),
    )
    trainer.add_callback(ScheduleCallback(trainer, prepared, settings, stop))
    # Without this Trainer would multiply loss and gradients of a classifier by world size x accumulation steps
    # (huggingface/transformers#47688), and `max_grad_norm` would clip inflated gradients.
    assert trainer.model_accepts_loss_kwargs is False
    trainer.accelerator.ddp_handler = DDPArguments(
        find_unused_parameters=settings.ddp_find_unused_parameters,
        bucket_cap_mb=settings.ddp_bucket_cap_mb,
    )
    for default in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(default)
    if not settings.disable_tqdm:
        trainer.add_callback(QuietProgressCallback)
    train(trainer, prepared, world)
    prediction = trainer.predict(prepared.test_loader.dataset)
    logits = np.asarray(prediction.predictions)
    scores = score(logits, prepared.test_labels)
    prepared.record.finish(DDP(settings, world), prepared.model, prepared.tokenizer, logits, scores)
    return scores


def train(trainer: ReviewTrainer, prepared: Preparation, world: World) -> None:
    checkpoint, total_steps = prepared.resume.checkpoint, prepared.plan.total_steps
    if prepared.resume.step < total_steps:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        assert world.size == 1 or type(trainer.model_wrapped) is DistributedDataParallel, "Trainer was to use DDP"
        if trainer.state.global_step < total_steps:
            raise prepared.record.preempted(trainer.state.global_step)
    elif checkpoint is not None:  # only evaluations are left, and Trainer would make a step too many
        read_weights(checkpoint, prepared.model)
        trainer.accelerator.prepare_model(prepared.model, evaluation_mode=True)  # for bf16, as train() would have
        trainer.state.global_step = total_steps
        if prepared.record.begin(prepared.plan):
            trainer.evaluate()
    prepared.record.load_best(DDP(prepared.record.settings, world), prepared.model)


def training_arguments(prepared: Preparation, settings: Settings) -> TrainingArguments:
    """Our settings under Trainer's names. Optimizer and schedule are handed over as objects instead."""
    return TrainingArguments(
        output_dir=str(prepared.record.folder),
        per_device_train_batch_size=prepared.plan.micro_size,
        per_device_eval_batch_size=settings.eval_batch_size,
        gradient_accumulation_steps=prepared.plan.accumulation_steps,
        num_train_epochs=settings.num_train_epochs,
        max_steps=prepared.plan.total_steps,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        bf16=settings.bf16,
        eval_strategy="no",  # Schedule decides on both, so that they follow the same steps as in app.ddp_loop
        save_strategy="no",
        logging_strategy="no",  # the record keeps every step's loss; Trainer's log would gather it once more
        logging_nan_inf_filter=False,  # a loss that is not finite should be seen, and the filter synchronises each step
        use_cpu=prepared.record.world.device.type == "cpu",
        ddp_backend="gloo" if prepared.record.world.device.type == "cpu" else "nccl",
        ddp_find_unused_parameters=settings.ddp_find_unused_parameters,  # None would mean True
        ddp_bucket_cap_mb=settings.ddp_bucket_cap_mb,
        ddp_timeout=settings.ddp_timeout,
        disable_tqdm=settings.disable_tqdm,
        label_names=["labels"],  # else every argument of the model's forward that has "label" in its name
        report_to="none",
    )


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Trainer's hook: the figures of the gathered rows, logits float (n, classes) and class ids int64 (n,)."""
    logits, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    scores = score(logits, labels)
    return {name: getattr(scores, name) for name in ("accuracy", "f1", "precision", "recall", "loss")}


class DDPArguments(DistributedDataParallelKwargs):  # type: ignore[misc]
    """The arguments that app.ddp_loop gives DDP. accelerate drops those that equal its own defaults, such as a
    `bucket_cap_mb` of 25, for which DDP does not make its first bucket small as it does for None."""

    def to_kwargs(self) -> dict[str, Any]:
        return {"find_unused_parameters": self.find_unused_parameters, "bucket_cap_mb": self.bucket_cap_mb}


class QuietProgressCallback(ProgressCallback):
    """Trainer's progress bar without its dictionaries of figures: the record shows each evaluation in a line."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        pass


class ScheduleCallback(TrainerCallback):
    """What happens between Trainer's steps, in the same order as in app.ddp_loop: seeds, checkpoints, evaluations, and
    stopping on request."""

    def __init__(self, trainer: ReviewTrainer, prepared: Preparation, settings: Settings, stop: StopRequest) -> None:
        self.trainer, self.prepared, self.settings, self.stop = trainer, prepared, settings, stop
        self.plan, self.record, self.world = prepared.plan, prepared.record, prepared.record.world

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Seed this rank, or restore what a checkpoint holds, right before the first step.

        Trainer has seeded all ranks alike, which would give them the same dropout masks. From a checkpoint it has read
        the weights and its own counters; optimizer, schedule and random streams are read here.
        """
        set_seed(self.settings.seed + self.world.rank)
        if self.prepared.resume.checkpoint is not None:
            batch = {name: x.to(self.world.device) for name, x in next(iter(self.prepared.train_loader)).items()}
            build_buckets(self.trainer.model_wrapped, batch, self.world)
            optimizer, scheduler = kwargs["optimizer"], kwargs["lr_scheduler"]
            read_training_state(self.prepared.resume, self.prepared.model, optimizer, scheduler, self.world)
        if self.record.begin(self.plan):
            self.trainer.evaluate()

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Trainer passes the epoch on to samplers that accelerate has wrapped; ours is not wrapped."""
        kwargs["train_dataloader"].sampler.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write a due checkpoint now: Trainer's own would follow the evaluation, be written in place, and be resumed
        from when it is incomplete (huggingface/transformers#35782)."""
        settings, step = self.settings, state.global_step
        stop_requested = self.stop.agreed()
        if stop_requested or self.plan.due(settings.save_strategy, settings.save_steps, step):

            def fill(staging: Path) -> None:
                optimizer, scheduler = kwargs["optimizer"], kwargs["lr_scheduler"]
                write_training_state(self.prepared.model, optimizer, scheduler, self.world, staging)
                if self.world.is_main_process:
                    state.save_to_json(str(staging / TRAINER_STATE_NAME))

            self.record.save_checkpoint(step, fill)
        stopping = stop_requested and step < self.plan.total_steps
        control.should_training_stop = control.should_training_stop or stopping
        control.should_evaluate = not stopping and self.plan.due(settings.eval_strategy, settings.eval_steps, step)


class ReviewTrainer(Trainer):
    """Trainer with the batches, the exact evaluation and the run record that both roads share."""

    def __init__(self, prepared: Preparation, world: World, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.prepared, self.world, self.record = prepared, world, prepared.record
        self.micro_losses: list[torch.Tensor] = []
        self.micro_batches: list[dict[str, torch.Tensor]] = []

    # ---- the data -------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The shared loader as it is: accelerate would deal whole batches to ranks where `DistributedSampler` deals
        rows."""
        return self.prepared.train_loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """This rank's share of the watched rows, each row on one rank."""
        return self.prepared.watched_loader

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """This rank's share of the test rows, each row on one rank."""
        return self.prepared.test_loader

    # ---- the record -----------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Keeps the loss of each micro-batch for the record."""
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.micro_losses.append(loss)
        self.micro_batches.append(inputs)
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Called between clipping and the optimizer's step: the one place that sees every step's gradient norm."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        step = self.state.global_step + 1
        epoch = step / self.prepared.plan.steps_per_epoch
        loss = sum(self.micro_losses, start=torch.zeros((), device=self.world.device))
        assert isinstance(self.optimizer, AcceleratedOptimizer)
        self.prepared.guard_step(step, self.optimizer.optimizer, norm)
        self.record.add_step(step, epoch, loss, norm, self._get_learning_rate(), self.micro_batches)
        self.micro_losses, self.micro_batches = [], []
        if step % self.record.settings.logging_steps == 0 or step == self.state.max_steps:
            self.record.write_steps()
        return norm

    # ---- the evaluation -------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Writes the figures to the record, and stops the training's clock."""
        self.record.write_steps()
        metrics = super().evaluate(*args, **kwargs)
        step, n = self.state.global_step, len(self.prepared.watched_labels)
        figures = {name.removeprefix("eval_"): value for name, value in metrics.items()}
        self.record.write_evaluation(step, step / self.prepared.plan.steps_per_epoch, self.prepared.watched, n, figures)
        strategy = DDP(self.record.settings, self.world)
        self.record.keep_best(step, strategy, self.prepared.model, figures)
        self.record.start_clock()
        return metrics

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Each row once: Trainer's own loop repeats rows to make the ranks' shares equal and averages batch means, so
        that its `eval_loss` counts the last batch's duplicates."""
        model = self.prepared.model.eval()
        broadcast_buffers(model, self.world)
        shard: list[torch.Tensor] = []
        for batch in dataloader:
            _, logits, _ = self.prediction_step(model, batch, prediction_loss_only=False, ignore_keys=ignore_keys)
            first = logits[0] if isinstance(logits, tuple) else logits  # some models return more than logits
            assert first is not None
            shard.append(first)
        is_test = dataloader is self.prepared.test_loader
        labels = self.prepared.test_labels if is_test else self.prepared.watched_labels
        rows = gather_rows(list(dataloader.sampler), shard, len(labels), self.world)
        figures = compute_metrics(EvalPrediction(rows, labels))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        return EvalLoopOutput(predictions=rows, label_ids=labels, metrics=metrics, num_samples=len(labels))


if __name__ == "__main__":
    launch(main, __doc__)
