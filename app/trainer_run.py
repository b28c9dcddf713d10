"""The same fine-tuning with transformers.Trainer: same rows, order, weights, optimizer and schedule as app.ddp_loop.

    torchrun --nproc_per_node=2 -m app.trainer_run
    python -m app.trainer_run --csv reviews.csv --text_column text --model bert-base-chinese

The docstring of each overridden method explains what would differ without it. Everything else is Trainer's own code.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import (
    EvalPrediction,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import EvalLoopOutput

from app.checkpoint.deepspeed_state import DeepSpeedState
from app.checkpoint.state import TrainingState, load_weights, unreadable
from app.cli import launch
from app.data.loaders import EvalSet
from app.distributed.collectives import broadcast_buffers, gather_rows, raise_on_all_ranks
from app.distributed.preemption import StopRequest
from app.distributed.process_group import join
from app.distributed.world import World
from app.metrics.score import Scores, score
from app.model.inputs import to_device
from app.model.precision import mixed_precision
from app.progress import hides_progress
from app.settings import Settings
from app.strategies.deepspeed_engine import DeepSpeed, complete
from app.strategies.loss_scale import LossScale
from app.training.console import describe_result
from app.training.dropout import seed_micro_batch
from app.training.dry_run import print_plan
from app.training.loss_guard import skip_step_if_nonfinite
from app.training.optim import build_optimizer, build_scheduler
from app.training.prepare import Preparation, prepare
from app.training.trainer_arguments import training_arguments, unset_engine


def main(settings: Settings) -> None:
    with join(settings) as world:
        if settings.dry_run:
            print_plan("trainer_run", settings, world)
        else:
            fine_tune(settings, world, exits_next=True)


def fine_tune(settings: Settings, world: World, exits_next: bool = False) -> None:
    """Prepare the data and the model, train, and evaluate once on the test rows.

    Args:
        exits_next: whether the process exits afterwards, so that a finished run ignores stop requests.
    """
    prepared = prepare("trainer_run", settings, world)
    with StopRequest(world, ignore_afterwards=exits_next) as stop, prepared.record.locate_failures(), prepared.profiler:
        scores = train_and_test(prepared, world, stop)
        world.print_main(describe_result(scores, prepared.record))


def train_and_test(prepared: Preparation, world: World, stop: StopRequest) -> Scores:
    """Train, and return the scores of the test rows. Collective."""
    data = prepared.data
    trainer = ReviewTrainer(
        prepared,
        world,
        model=prepared.model,
        args=training_arguments(prepared, world),
        data_collator=data.collator,
        train_dataset=prepared.train_loader.dataset,
        eval_dataset=prepared.eval_set.loader.dataset,
        processing_class=data.tokenizer,
        compute_metrics=compute_metrics,
    )
    unset_engine()
    trainer.add_callback(ScheduleCallback(trainer, prepared, world, stop))
    # If this were true, Trainer would multiply the loss and the gradients of a classifier by world size x accumulation
    # steps (huggingface/transformers#47688), and `max_grad_norm` would clip inflated gradients.
    assert trainer.model_accepts_loss_kwargs is False
    for default in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(default)
    if not hides_progress(prepared.settings.disable_tqdm, world.is_main_process):
        trainer.add_callback(QuietProgressCallback)
    train(trainer, prepared, world)
    logits = np.asarray(trainer.predict(prepared.test_set.loader.dataset).predictions)
    scores = score(logits, prepared.test_set.labels)
    prepared.record.finish(prepared.strategy, prepared.model, data.tokenizer, logits, scores)
    return scores


def train(trainer: ReviewTrainer, prepared: Preparation, world: World) -> None:
    """Train up to the last step, from the beginning or from a checkpoint.

    Raises:
        Preempted: the run was asked to stop, and has saved a checkpoint.
        RunError: a loss or gradient norm is not finite.
    """
    checkpoint, total_steps = prepared.resume.checkpoint, prepared.plan.total_steps
    all_steps_are_done = prepared.resume.step == total_steps
    if checkpoint is not None and (all_steps_are_done or prepared.settings.deepspeed is not None):
        load_weights(prepared.model, checkpoint, world)  # DeepSpeed's engine copies them when it is created
    if not all_steps_are_done:
        with own_counters(checkpoint, world) as folder:
            trainer.train(resume_from_checkpoint=folder)
        assert trainer.model_wrapped is trainer.wrapped, "Trainer has wrapped the model again"
        if trainer.state.global_step < total_steps:
            raise prepared.record.preempted(trainer.state.global_step)
    else:  # only evaluations are left, but Trainer would train one more step
        trainer.state.global_step = total_steps
        if trainer.wrapped is prepared.model:  # an engine would have placed it on the device
            prepared.model.to(device=world.device)  # type: ignore[call-arg]
        if prepared.record.begin(prepared.plan, trainer.wrapped):
            trainer.evaluate()
    if prepared.settings.load_best_model_at_end:  # otherwise ZeRO-3 would gather all parameters for nothing
        with complete(prepared.model.parameters(), write=True):
            prepared.record.load_best(prepared.model)


@contextmanager
def own_counters(checkpoint: Path | None, world: World) -> Iterator[str | None]:
    """Copy what Trainer reads from a checkpoint, its counters, and yield the folder of the copy. Collective.

    Trainer reads it more than once. Meanwhile, the run to which the checkpoint belongs may remove it.

    Raises:
        AgreedError: it has been removed already.
    """
    if checkpoint is None:
        yield None
        return
    with TemporaryDirectory() as folder:
        with raise_on_all_ranks(world):
            try:
                shutil.copy(checkpoint / TRAINER_STATE_NAME, folder)
            except OSError as problem:
                raise unreadable(checkpoint, problem) from None
        yield folder


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Compute the metrics of the gathered rows: logits, float (n, classes), and class ids, int64 (n,)."""
    scores = score(np.asarray(prediction.predictions), np.asarray(prediction.label_ids))
    return {name: getattr(scores, name) for name in ("accuracy", "f1", "precision", "recall", "loss")}


class QuietProgressCallback(ProgressCallback):
    """Trainer's progress bar, without printing the logged dictionaries: the record prints its own lines."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        pass


class ScheduleCallback(TrainerCallback):
    """Run everything around Trainer's optimizer steps in the same order as app.ddp_loop.

    This covers the check of the gradient norm, the record, checkpoints, evaluations and stop requests.
    """

    def __init__(self, trainer: ReviewTrainer, prepared: Preparation, world: World, stop: StopRequest) -> None:
        self.trainer, self.prepared, self.world, self.stop = trainer, prepared, world, stop
        self.settings, self.plan, self.record = prepared.settings, prepared.plan, prepared.record

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """If the run resumes, load the training state right before the first step. Trainer has loaded its counters."""
        if self.prepared.resume.checkpoint is not None:
            self._training_state().load(self.prepared.resume.checkpoint)
        if self.record.begin(self.plan, self.trainer.wrapped):
            self.trainer.evaluate()

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Set the sampler's epoch: Trainer does that only for samplers that accelerate has wrapped."""
        kwargs["train_dataloader"].sampler.set_epoch(int(state.epoch or 0))

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Skip the step if the gradient norm is not finite."""
        trainer = self.trainer
        skip_step_if_nonfinite(self.prepared.strategy.local_optimizer(trainer.shared_optimizer), trainer.grad_norm)
        trainer.loss_scale.update(trainer.grad_norm)

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the measurements of the step, which the schedule and the step counter do not include yet."""
        trainer, step = self.trainer, state.global_step + 1
        losses = torch.stack(trainer.micro_losses)
        learning_rate = float(kwargs["lr_scheduler"].get_last_lr()[0])
        epoch = step / self.plan.steps_per_epoch
        self.record.add_step(step, epoch, losses, trainer.grad_norm, learning_rate, trainer.micro_batches)
        trainer.micro_losses, trainer.micro_batches = [], []
        if step % self.settings.logging_steps == 0 or step == state.max_steps:
            self.record.write_steps()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write a due checkpoint now, and let Trainer evaluate or stop.

        Trainer's own checkpoint would follow the evaluation, be written in place, and be resumed from even if it is
        incomplete (huggingface/transformers#35782).
        """
        settings, step = self.settings, state.global_step
        self.prepared.profiler.step()
        stop_requested = self.stop.requested()
        if stop_requested or self.plan.due(settings.save_strategy, settings.save_steps, step):

            def write(staging: Path) -> None:
                self._training_state().save(staging)
                if self.world.is_main_process:
                    state.save_to_json(str(staging / TRAINER_STATE_NAME))

            self.record.save_checkpoint(step, write)
        stopping = stop_requested and step < self.plan.total_steps
        control.should_training_stop = control.should_training_stop or stopping
        control.should_evaluate = not stopping and self.plan.due(settings.eval_strategy, settings.eval_steps, step)

    def _training_state(self) -> TrainingState:
        trainer, strategy = self.trainer, self.prepared.strategy
        state = (self.prepared.model, trainer.shared_optimizer, trainer.shared_scheduler, trainer.loss_scale, strategy)
        if self.prepared.deepspeed_config is not None:
            return DeepSpeedState(*state, self.world, trainer.wrapped)
        return TrainingState(*state, self.world)


class ReviewTrainer(Trainer):
    """Trainer with the batches, optimizer, exact evaluation and run record that both training paths share."""

    def __init__(self, prepared: Preparation, world: World, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.prepared, self.world, self.record = prepared, world, prepared.record
        self.micro_losses: list[torch.Tensor] = []
        self.micro_batches: list[dict[str, torch.Tensor]] = []
        self.grad_norm = torch.zeros(())
        self.wrapped = prepared.strategy.wrap(prepared.model)
        self.loss_scale = LossScale(prepared.settings, prepared.plan, world)
        # Otherwise accelerate calls optimizer.load_state_dict(optimizer.state_dict()), and ZeroRedundancyOptimizer has
        # no state dict before it is consolidated.
        self.accelerator.device_placement = False

    # ---- data ------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the shared loader: accelerate would assign complete batches to ranks instead of single rows."""
        return self.prepared.train_loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return this rank's share of the eval set: each row is on one rank."""
        return self.prepared.eval_set.loader

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return this rank's share of the test set: each row is on one rank."""
        return self.prepared.test_set.loader

    # ---- optimization ----------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Build the shared optimizer: Trainer's default groups parameters by name instead of by shape."""
        if isinstance(self.optimizer, torch.optim.Optimizer):  # with DeepSpeed, Trainer calls this twice
            return self.optimizer
        settings, strategy = self.prepared.settings, self.prepared.strategy
        self.shared_optimizer = build_optimizer(self.wrapped, settings, self.prepared.learning_rate, strategy)
        self.optimizer = self.shared_optimizer
        return self.shared_optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LRScheduler:
        """Build the shared schedule: Trainer would derive the warmup from its own arguments."""
        self.shared_scheduler = build_scheduler(self.shared_optimizer, self.prepared.settings, num_training_steps)
        self.lr_scheduler = self.shared_scheduler  # type: ignore[assignment]
        return self.shared_scheduler

    def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Seed dropout for the micro-batch, and let the strategy accumulate or average the gradients.

        Trainer would use one stream of random numbers, and one all-reduce over all micro-batches of a process.
        """
        number = len(self.micro_batches)
        index, micro_batch = divmod(number, self.prepared.plan.accumulation_steps)
        strategy, seed = self.prepared.strategy, self.prepared.settings.seed
        seed_micro_batch(seed, self.state.global_step, strategy.logical_ranks[index], micro_batch)
        self.micro_batches.append(inputs)
        with strategy.accumulate(model, number):
            return super().training_step(model, inputs, *args, **kwargs)

    def _prepare_inputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy a batch as app.ddp_loop does: Trainer would wait for the copy of each tensor."""
        return to_device(inputs, self.prepared.model, self.world)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the loss of each micro-batch for the record: Trainer adds them up over a logging interval."""
        loss: Any = super().compute_loss(*args, **kwargs)
        if not isinstance(loss, torch.Tensor):  # in an evaluation, it is a tuple of the loss and the model's outputs
            return loss
        self.micro_losses.append(loss.detach())
        return self.loss_scale.scale(loss)

    def compute_loss_context_manager(self) -> Any:
        """Use the shared mixed precision: accelerate's has no fp16 on CPUs, and its own loss scaling."""
        return mixed_precision(self.prepared.settings, self.world)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Use the strategy's wrapper: Trainer would wrap the model in DDP, without the fixed order of additions.

        With DeepSpeed, Trainer creates the engine next.
        """
        if training and isinstance(self.prepared.strategy, DeepSpeed):
            self.prepared.strategy.place(self.accelerator.state.deepspeed_plugin.deepspeed_config)
        return self.wrapped if training else model

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Load no checkpoint: Trainer and DeepSpeed expect other files. ScheduleCallback loads it."""
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, None)
        settings = self.prepared.settings
        if settings.deepspeed is not None or settings.fsdp:  # Trainer has wrapped the model, and might choose plain DDP
            wrapper = "FSDPModule" if settings.fsdp else "DeepSpeedEngine"
            assert wrapper in [base.__name__ for base in type(model).__mro__], f"a {type(model)} is no {wrapper}"
            self.wrapped = model
        return model, loader

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load nothing: Trainer expects the complete weights in one file. ScheduleCallback loads them."""

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        """Clip with the strategy, and keep the norm: Trainer's public hooks do not get it as a tensor on the device."""
        self.grad_norm = self.prepared.strategy.clip_grad_norm(model, self.args.max_grad_norm, self.loss_scale.value)
        return self.grad_norm

    # ---- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Record the scores, and do not count the evaluation as training time."""
        self.record.write_steps()
        metrics = super().evaluate(*args, **kwargs)
        step, eval_set = self.state.global_step, self.prepared.eval_set
        epoch = step / self.prepared.plan.steps_per_epoch
        by_name = {name.removeprefix("eval_"): value for name, value in metrics.items()}
        self.record.write_evaluation(step, epoch, eval_set.name, len(eval_set), by_name)
        self.record.keep_best(step, self.prepared.strategy, self.prepared.model, by_name)
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
        """Evaluate each row exactly once.

        Trainer's own loop repeats rows to make the ranks' shares equal, and its `eval_loss` is an average of batch
        means that includes the repeated rows.
        """
        sets: tuple[EvalSet, ...] = (self.prepared.test_set, self.prepared.eval_set)
        eval_set = next(one for one in sets if one.loader is dataloader)
        model = self.prepared.model.eval()
        broadcast_buffers(model, self.world)
        shard: list[torch.Tensor] = []
        for batch, is_filler in zip(dataloader, eval_set.is_filler, strict=True):
            _, logits, _ = self.prediction_step(model, batch, prediction_loss_only=False, ignore_keys=ignore_keys)
            class_logits = logits[0] if isinstance(logits, tuple) else logits  # some models return further outputs
            assert class_logits is not None
            if not is_filler:
                shard.append(class_logits)
        gathered = gather_rows(eval_set.positions, shard, len(eval_set), self.world)
        metrics = compute_metrics(EvalPrediction(gathered, eval_set.labels))
        return EvalLoopOutput(
            predictions=gathered,
            label_ids=eval_set.labels,
            metrics={f"{metric_key_prefix}_{name}": value for name, value in metrics.items()},
            num_samples=len(eval_set),
        )


if __name__ == "__main__":
    launch(main, __doc__, refused={})
