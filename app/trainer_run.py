"""The same fine-tuning with transformers.Trainer: same rows, order, weights, optimizer and schedule as app.ddp_loop.

    torchrun --standalone --nproc_per_node=2 -m app.trainer_run
    python -m app.trainer_run --csv reviews.csv --text_column text --model bert-base-chinese

What is left of Trainer is the loop itself: over epochs, steps and micro-batches, with `backward`, `optimizer.step`,
`scheduler.step`, the counters that a checkpoint contains, and the order of the callbacks. `ReviewTrainer` overrides the
rest, because it would train differently. Trainer's default, and its replacement here:

    loaders              complete batches per rank, with repeated rows    rows per rank: a DistributedSampler
    wrapper              DDP, FSDP or DeepSpeed, by its arguments         the strategy's
    optimizer, schedule  from its arguments                               the shared ones, built from the settings
    dropout              one stream of random numbers per process         masks that belong to the rows
    mixed precision      accelerate's, with its own loss scaling          the shared one
    clipping             by the gradients of this rank                    by a norm that is the same for all strategies
    evaluation           repeats rows; the loss is a mean of means        each row exactly once
    checkpoints          after the evaluation, written in place           before it, and complete or absent
    logs                 mean losses                                      the record: one line per step
"""

from __future__ import annotations

if __name__ == "__main__":
    from .program import Program

    Program(__doc__).check_command_line()  # before torch is imported, which takes seconds

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from transformers import PrinterCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from .distributed.preemption import StopRequest
from .distributed.process_group import join
from .distributed.world import World
from .metrics.score import score
from .program import Program
from .record.run_record import RunRecord
from .settings import Settings
from .trainer.arguments import training_arguments
from .trainer.review_trainer import NothingLeftToTrain, RecordCallback, ReviewTrainer
from .training.prepare import Preparation, prepare


def main(settings: Settings) -> None:
    with join(settings) as world:
        if settings.dry_run:
            from .plan.report import print_plan  # here, because other runs do not need it

            print_plan("trainer_run", settings, world)
        else:
            fine_tune(settings, world)


def fine_tune(settings: Settings, world: World) -> None:
    """Prepare the data and the model, train, and evaluate once on the test rows."""
    prepared = prepare("trainer_run", settings, world)
    record, data = RunRecord(prepared), prepared.data
    with StopRequest(world) as stop, record.locate_failures():
        trainer = ReviewTrainer(
            prepared,
            record,
            model=prepared.model,
            args=training_arguments(prepared),
            data_collator=data.collator,
            train_dataset=data.train_rows,
            eval_dataset=prepared.eval_set.loader.dataset,
            processing_class=data.tokenizer,
        )
        # Trainer assumes that a forward() with **kwargs divides the loss by num_items_in_batch. Classifiers do not, so
        # Trainer would multiply the loss and the gradients by world size x accumulation steps
        # (huggingface/transformers#47688), and `max_grad_norm` would clip inflated gradients.
        trainer.model_accepts_loss_kwargs = False
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(RecordCallback(trainer, stop))
        train(trainer, prepared)
        logits = np.asarray(trainer.predict(prepared.test_set.loader.dataset).predictions)
        record.finish(logits, score(logits, prepared.test_set.labels, prepared.test_set.positive_class))


def train(trainer: ReviewTrainer, prepared: Preparation) -> None:
    """Train up to the last step, from the beginning or from a checkpoint.

    Raises:
        Preempted: the run was asked to stop, and has saved a checkpoint.
        RunError: a gradient norm is not finite, a checkpoint cannot be written, or the best weights are damaged.
    """
    resume, plan = prepared.resume, prepared.plan
    with TemporaryDirectory() as folder, suppress(NothingLeftToTrain):
        epoch, size = resume.step / plan.steps_per_epoch, plan.micro_size
        counters = TrainerState(global_step=resume.step, epoch=epoch, train_batch_size=size)
        counters.save_to_json(str(Path(folder, TRAINER_STATE_NAME)))  # all that Trainer reads of a checkpoint
        trainer.train(resume_from_checkpoint=folder if resume.step else None)
    assert trainer.model_wrapped is trainer.wrapped, "Trainer has wrapped the model again"
    trainer.record.best.load(trainer.record.state)


if __name__ == "__main__":
    Program(__doc__).launch(main)
