"""Trainer with the batches, optimizer, exact evaluation and run record that both training paths share.

The docstring of each override explains what would differ without it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import EvalLoopOutput

from ..checkpoint.state import TrainingState
from ..data.batches import EvalSet
from ..distributed.collectives import broadcast_buffers, gather_rows
from ..distributed.preemption import StopRequest
from ..metrics.score import score
from ..model.dropout import RowDropout
from ..model.inputs import to_device
from ..model.load import mixed_precision
from ..record.run_record import RunRecord
from ..strategies.optimization import LossScale, Optimization
from ..training.prepare import Preparation
from ..training.step import build_optimizer, build_scheduler, skip_step_if_nonfinite


class ReviewTrainer(Trainer):
    def __init__(self, prepared: Preparation, record: RunRecord, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.prepared, self.record, self.world = prepared, record, prepared.world
        self.micro_losses: list[torch.Tensor] = []
        self.micro_batches: list[dict[str, torch.Tensor]] = []
        self.grad_norm = torch.zeros(())
        self.masks: RowDropout  # of the next micro-batch
        self.train_loader = prepared.data.train_loader(prepared.strategy.logical_ranks, prepared.settings, self.world)
        self.wrapped = prepared.strategy.wrap(prepared.model)
        self.loss_scale = LossScale(prepared.settings.precision, prepared.plan, self.world)
        # Otherwise accelerate calls optimizer.load_state_dict(optimizer.state_dict()), and ZeroRedundancyOptimizer has
        # no state dict before it is consolidated.
        self.accelerator.device_placement = False

    # ---- data ------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the shared loader: accelerate would assign complete batches to ranks instead of single rows."""
        return self.train_loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return this rank's share of the eval set: each row is on one rank."""
        return self.prepared.eval_set.loader

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return this rank's share of the test set: each row is on one rank."""
        return self.prepared.test_set.loader

    # ---- optimization ----------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Build the shared optimizer: Trainer's default groups parameters by name instead of by shape."""
        prepared = self.prepared
        self.shared_optimizer = build_optimizer(self.wrapped, prepared.settings, strategy=prepared.strategy)
        self.optimizer = self.shared_optimizer
        return self.shared_optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LRScheduler:
        """Build the shared schedule: Trainer would derive the warmup from its own arguments."""
        self.shared_scheduler = build_scheduler(self.shared_optimizer, self.prepared.settings, num_training_steps)
        self.lr_scheduler = self.shared_scheduler  # type: ignore[assignment]
        return self.shared_scheduler

    def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Choose the micro-batch's dropout masks, and let the strategy accumulate or average the gradients.

        Trainer would use one stream of random numbers, and one all-reduce over all micro-batches of a process.
        """
        number = len(self.micro_batches)
        index, micro_batch = divmod(number, self.prepared.plan.accumulation_steps)
        strategy = self.prepared.strategy
        rows = self.prepared.plan.rows_of(strategy.logical_ranks[index], micro_batch)
        self.masks = RowDropout(self.prepared.settings.seed, self.state.global_step, rows)
        self.micro_batches.append(inputs)
        with strategy.accumulate(model, number):
            return super().training_step(model, inputs, *args, **kwargs)

    def floating_point_ops(self, inputs: Any) -> int:
        """Count nothing: Trainer would count the parameters in each step, and nobody reads the result."""
        return 0

    def _prepare_inputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy a batch as app.ddp_loop does: Trainer would wait for the copy of each tensor."""
        return to_device(inputs, self.prepared.model, self.world)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the shared loss, and keep that of each micro-batch: Trainer adds them up over a logging interval."""
        if not model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        with self.masks:
            _, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = self.prepared.loss(outputs, inputs["labels"], self.state.global_step)
        self.micro_losses.append(loss.detach())
        return self.loss_scale.scale(loss)

    def compute_loss_context_manager(self) -> Any:
        """Use the shared mixed precision: accelerate's has no fp16 on CPUs, and its own loss scaling."""
        return mixed_precision(self.prepared.settings.precision, self.world.device)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Use the strategy's wrapper: Trainer would wrap the model in DDP, without the fixed order of additions."""
        return self.wrapped if training else model

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Load no checkpoint: Trainer expects other files. RecordCallback loads it."""
        return super()._prepare_for_training(max_steps, train_dataloader, None)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load nothing: Trainer expects the complete weights in one file. RecordCallback loads them."""

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        """Clip with the strategy, and keep the norm: Trainer's public hooks do not get it as a tensor on the device."""
        self.grad_norm = self.prepared.strategy.clip_grad_norm(self.args.max_grad_norm, self.loss_scale.value)
        return self.grad_norm

    # ---- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Record the scores: Trainer would log them in a file of its own."""
        prepared = self.prepared
        metrics = super().evaluate(*args, **kwargs)
        scores = {name.removeprefix("eval_"): value for name, value in metrics.items()}
        scores["n"] = len(prepared.eval_set.labels)
        self.record.after_evaluation(self.state.global_step, prepared.eval_set.name, scores)
        if self.record.early_stopping.stops:  # otherwise it is true after the last step already
            self.control.should_training_stop = True
        return metrics

    def evaluation_loop(  # noqa: PLR0917 (the caller's signature)
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
        eval_set = next(candidate for candidate in sets if candidate.loader is dataloader)
        model = self.prepared.model.eval()
        broadcast_buffers(model, self.world)
        device, n_classes = self.world.device, len(model.config.id2label)
        shard, n_done = torch.empty(len(eval_set.positions), n_classes, dtype=torch.float64, device=device), 0
        for batch, is_filler in zip(dataloader, eval_set.is_filler, strict=True):
            _, logits, _ = self.prediction_step(model, batch, prediction_loss_only=False, ignore_keys=ignore_keys)
            class_logits = logits[0] if isinstance(logits, tuple) else logits  # some models return further outputs
            assert class_logits is not None
            if not is_filler:
                shard[n_done : n_done + len(class_logits)] = class_logits
                n_done += len(class_logits)
        assert n_done == len(shard), f"{n_done} rows were evaluated, not {len(shard)}"
        gathered = gather_rows(eval_set.positions, shard, len(eval_set.labels), world=self.world)
        scores = score(gathered, eval_set.labels, eval_set.positive_class)
        names = ("accuracy", "f1", "precision", "recall", "loss")
        return EvalLoopOutput(
            predictions=gathered,
            label_ids=eval_set.labels,
            metrics={f"{metric_key_prefix}_{name}": getattr(scores, name) for name in names},
            num_samples=len(eval_set.labels),
        )


# ---- callback --------------------------------------------------------------------------------------------------------


class NothingLeftToTrain(Exception):
    """Only evaluations are left, but Trainer would train one more step."""


class RecordCallback(TrainerCallback):
    """Add the actions of app/ddp_loop.py around Trainer's optimizer steps, in the same order.

    This covers the state of a resumed run, the check of the gradient norm, and all that follows a step.
    """

    def __init__(self, trainer: ReviewTrainer, stop: StopRequest) -> None:
        self.trainer, self.prepared, self.record, self.stop = trainer, trainer.prepared, trainer.record, stop

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """If the run resumes, load the training state right before the first step. Trainer has loaded its counters."""
        prepared, trainer = self.prepared, self.trainer
        optimization = Optimization(trainer.shared_optimizer, trainer.shared_scheduler, trainer.loss_scale)
        training_state = TrainingState(prepared.model, optimization, prepared.strategy, prepared.world)
        if prepared.resume.checkpoint is not None:
            training_state.load(prepared.resume.checkpoint)
        if self.record.begin(training_state, trainer.wrapped, self.stop):
            trainer.evaluate()  # the run was interrupted between the checkpoint and the evaluation of the same step
        if prepared.resume.step == prepared.plan.total_steps or self.record.early_stopping.stops:
            raise NothingLeftToTrain

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Set the sampler's epoch: Trainer does that only for samplers that accelerate has wrapped."""
        kwargs["train_dataloader"].sampler.set_epoch(int(state.epoch or 0))

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Skip the step if the gradient norm is not finite. Keep its learning rate: the schedule advances with it."""
        trainer, strategy = self.trainer, self.prepared.strategy
        skip_step_if_nonfinite(strategy.local_optimizer(trainer.shared_optimizer), trainer.grad_norm)
        trainer.loss_scale.update(trainer.grad_norm)
        self.learning_rate = float(trainer.shared_scheduler.get_last_lr()[0])

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log, save and evaluate if it is due."""
        trainer = self.trainer
        losses, batches = torch.stack(trainer.micro_losses), trainer.micro_batches
        trainer.micro_losses, trainer.micro_batches = [], []
        control.should_evaluate = self.record.after_step(
            state.global_step, losses, trainer.grad_norm, learning_rate=self.learning_rate, batches=batches
        )
