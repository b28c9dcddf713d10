"""The callback through which the record of a run and the strategy take part in Trainer's loop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..checkpoint.state import TrainingState
from ..distributed.preemption import StopRequest
from ..distributed.world import World
from ..strategies.optimization import Optimization
from ..training.optim import skip_step_if_nonfinite
from ..training.prepare import Preparation
from .deepspeed_state import DeepSpeedState

if TYPE_CHECKING:
    from .review_trainer import ReviewTrainer


class RecordCallback(TrainerCallback):
    """Add the actions of app/ddp_loop.py around Trainer's optimizer steps, in the same order.

    This covers the state of a resumed run, the check of the gradient norm, and all that follows a step.
    """

    def __init__(self, trainer: ReviewTrainer, prepared: Preparation, world: World, *, stop: StopRequest) -> None:
        self.trainer, self.prepared, self.world, self.stop = trainer, prepared, world, stop

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """If the run resumes, load the training state right before the first step. Trainer has loaded its counters."""
        if self.prepared.resume.checkpoint is not None:
            self._training_state().load(self.prepared.resume.checkpoint)
        self.begin()

    def begin(self) -> None:
        """Start the record, and repeat the evaluation after the checkpoint's own step if there was one."""
        prepared, wrapped, profile_step = self.prepared, self.trainer.wrapped, self.prepared.profiler.step
        if prepared.record.begin(prepared.plan, wrapped, save=self.save, stop=self.stop, profile_step=profile_step):
            self.trainer.evaluate()

    def save(self, folder: Path) -> None:
        """Write the training state of a checkpoint, and Trainer's counters.

        Trainer's own checkpoint would follow the evaluation, be written in place, and be resumed from even if it is
        incomplete (huggingface/transformers#35782).
        """
        self._training_state().save(folder)
        if self.world.is_main_process:
            self.trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Set the sampler's epoch: Trainer does that only for samplers that accelerate has wrapped."""
        kwargs["train_dataloader"].sampler.set_epoch(int(state.epoch or 0))

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Skip the step if the gradient norm is not finite. Keep its learning rate: the schedule advances with it."""
        trainer = self.trainer
        skip_step_if_nonfinite(self.prepared.strategy.local_optimizer(trainer.shared_optimizer), trainer.grad_norm)
        trainer.loss_scale.update(trainer.grad_norm)
        self.learning_rate = float(trainer.shared_scheduler.get_last_lr()[0])

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log, save and evaluate if it is due."""
        trainer = self.trainer
        losses, batches = torch.stack(trainer.micro_losses), trainer.micro_batches
        trainer.micro_losses, trainer.micro_batches = [], []
        control.should_evaluate = self.prepared.record.after_step(
            state.global_step, losses, trainer.grad_norm, learning_rate=self.learning_rate, batches=batches
        )

    def _training_state(self) -> TrainingState:
        trainer, prepared = self.trainer, self.prepared
        optimization = Optimization(trainer.shared_optimizer, trainer.shared_scheduler, trainer.loss_scale)
        if prepared.deepspeed_config is not None:
            return DeepSpeedState(prepared.model, optimization, prepared.strategy, self.world, trainer.wrapped)
        return TrainingState(prepared.model, optimization, prepared.strategy, self.world)
