"""Fine-tune a text classifier with PyTorch DDP, in a hand-written training loop.

Two processes on this machine, which work on halves of the same batches:

    torchrun --standalone --nproc_per_node=2 -m app.ddp_loop

One process (breakpoints work), your own file, and a model from the Hugging Face Hub:

    python -m app.ddp_loop --csv reviews.csv --text_column text --model bert-base-chinese

Two machines with 8 GPUs each; on the second one --node_rank=1:

    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=10.0.0.1 --master_port=29500 -m app.ddp_loop

torchrun starts the same program in every process. Environment variables tell each process its `rank` and the number of
ranks (`world_size`). Everything else follows from these two numbers: which rows a process reads, which gradients are
averaged, and which process writes the files.
"""

from __future__ import annotations

if __name__ == "__main__":
    from .program import Program

    Program(__doc__).check_command_line()  # before torch is imported, which takes seconds

from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice, product

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from .checkpoint.state import TrainingState
from .data.batches import EvalSet, loader_options
from .distributed.collectives import broadcast_buffers, gather_rows, wait_for_device
from .distributed.preemption import StopRequest
from .distributed.process_group import join
from .distributed.world import World
from .metrics.score import Scores, score
from .model.dropout import RowDropout
from .model.inputs import to_device
from .model.load import mixed_precision
from .program import Program
from .record.run_record import RunRecord
from .settings import Settings
from .strategies.base import Strategy
from .strategies.optimization import LossScale, Optimization
from .training.prepare import Preparation, prepare
from .training.step import build_optimizer, build_scheduler, skip_step_if_nonfinite

Batch = dict[str, torch.Tensor]

# Read this page from top to bottom: its comments in capitals are numbered 1 to 8. A run executes 1, 5 and 6, then 2 to
# 4 and 7 in each step, and 8 when it evaluates.


def main(settings: Settings) -> None:
    # 1. THE PROCESS GROUP. dist.init_process_group connects the ranks, over NCCL if they use GPUs and over gloo if they
    #    use CPUs. Inside this block they communicate by collectives such as dist.all_reduce, which every rank has to
    #    call in the same order.
    with join(settings) as world:
        if settings.dry_run:
            from .plan.report import print_plan  # here, because other runs do not need it

            print_plan("ddp_loop", settings, world)
        else:
            fine_tune(settings, world)


def fine_tune(settings: Settings, world: World) -> None:
    """Prepare the data and the model, train, and evaluate once on the test rows."""
    # The same on every rank: rows, split, tokens and initial weights. They follow from the CSV, the model and the seed.
    prepared = prepare("ddp_loop", settings, world)
    record = RunRecord(prepared)  # the files of the run
    with StopRequest(world) as stop, record.locate_failures():
        train(prepared, record, stop)
        # No weights or settings were selected on the test rows.
        scores, logits = evaluate(prepared.model, prepared.test_set, prepared.settings, world=world)
        record.finish(logits, scores)


# 2. ONE OPTIMIZER STEP trains on one global batch = logical ranks x accumulation steps x rows of a micro-batch. A
#    logical rank is a rank, unless --logical_ranks gives each rank several shares of the batch (docs/learn.md).
def train_step(
    wrapped: torch.nn.Module,
    batches: Sequence[Batch],
    step: int,
    *,
    optimization: Optimization,
    strategy: Strategy,
    settings: Settings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Train on one global batch. Collective.

    Args:
        wrapped: the model as returned by `strategy.wrap`.
        batches: this rank's micro-batches of the global batch, on its device: those of its first logical rank first.
        step: the number of optimizer steps before this one.

    Returns:
        The mean loss of each micro-batch, shape (micro-batches,), and the norm of the averaged gradients before
        clipping, a scalar: both on the device. The host does not wait for them.
    """
    optimizer, scheduler, loss_scale = optimization.optimizer, optimization.scheduler, optimization.loss_scale
    wrapped.train()  # an evaluation may have turned dropout off
    losses = []
    places = product(strategy.logical_ranks, range(settings.gradient_accumulation_steps))
    for number, (batch, (logical_rank, micro_batch)) in enumerate(zip(batches, places, strict=True)):
        # 3. RANDOMNESS. With one seed for all ranks, their rows would share dropout masks. With a stream of random
        #    numbers per process, the masks would depend on the number of processes. So each row of the global batch
        #    has its own masks, whatever rank and micro-batch it is in.
        masks = RowDropout(settings.seed, step, strategy.plan.rows_of(logical_rank, micro_batch))
        # 4. ACCUMULATION. backward() adds to the gradients of the previous micro-batches. They stay local (DDP's
        #    no_sync) until the last backward() averages the sum over the ranks, so DDP's ranks exchange gradients once
        #    per step.
        with strategy.accumulate(wrapped, number):
            with mixed_precision(settings.precision, batch["labels"].device), masks:
                loss = optimization.loss(wrapped(**batch), batch["labels"], step)
            # This is the mean loss of the micro-batch, unless --class_weights is set (training/loss.py). All
            # micro-batches have the same number of rows, so the sum of mean / number of micro-batches is the mean over
            # this rank's rows, and the average over the ranks turns its gradient into that of the mean loss over the
            # global batch.
            loss_scale.scale(loss / len(batches)).backward()  # scaled for fp16 only
        losses.append(loss.detach())

    # Clip after averaging, so that every rank computes the same norm. A max_grad_norm of 0 means no clipping.
    norm = strategy.clip_grad_norm(settings.max_grad_norm or float("inf"), loss_scale.value)
    # Decided on the device: the host does not wait.
    skip_step_if_nonfinite(strategy.local_optimizer(optimizer), norm)
    loss_scale.update(norm)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return torch.stack(losses), norm


def train(prepared: Preparation, record: RunRecord, stop: StopRequest) -> None:
    """Train up to the last step, from the beginning or from a checkpoint.

    Raises:
        Preempted: the run was asked to stop, and has saved a checkpoint.
        RunError: a gradient norm is not finite, a checkpoint cannot be written, or the best weights are damaged.
    """
    settings, strategy, plan, world = prepared.settings, prepared.strategy, prepared.plan, prepared.world
    model, data = prepared.model, prepared.data

    # 5. THE MODEL. By default every rank holds a complete copy. DistributedDataParallel (strategies/ddp.py) copies rank
    #    0's weights to all ranks first. Then it registers hooks that run during backward(): as soon as the gradients of
    #    a bucket of parameters are ready, they are averaged over the ranks, while backward() computes the next bucket.
    wrapped = strategy.wrap(model)
    # All ranks get the same averaged gradients, so their optimizers make the same update and the copies of the model
    # stay equal. The weights themselves are never synchronized again. The other strategies divide the optimizer's state
    # (zero1) and also gradients and parameters (zero2, zero3) among the ranks, and exchange updated parameters.
    optimizer = build_optimizer(wrapped, settings, strategy=strategy)
    scheduler = build_scheduler(optimizer, settings, plan.total_steps)
    optimization = Optimization(optimizer, scheduler, LossScale(settings.precision, plan, world), prepared.loss)

    # A checkpoint holds the weights and all that updates them. Each rank writes its part.
    state = TrainingState(model, optimization, strategy, world)
    step = prepared.resume.step  # 0, unless the run resumes from a checkpoint
    if prepared.resume.checkpoint is not None:
        state.load(prepared.resume.checkpoint)
    # True if the run was interrupted between the checkpoint and the evaluation of the same step.
    if record.begin(state, wrapped, stop):
        evaluate_during_training(step, prepared, record)

    # 6. THE DATA. The sampler is a DistributedSampler: every rank computes the same permutation of the rows, and
    #    selects a different share of it. The loader turns this share into micro-batches.
    sampler = data.train_sampler(strategy.logical_ranks, settings)
    options = loader_options(data.collator, world.device)
    loader = DataLoader(data.train_rows, plan.micro_size, sampler=sampler, **options)
    for epoch in range(step // plan.steps_per_epoch, plan.epochs):
        if record.early_stopping.stops:
            break
        # Without set_epoch, every epoch would repeat the order of the first one. A resumed epoch skips the steps that
        # are done.
        steps_done = step % plan.steps_per_epoch
        sampler.set_epoch(epoch, steps_done)
        micro_batches = iter(loader)

        for _ in range(min(plan.steps_per_epoch - steps_done, plan.total_steps - step)):  # max_steps may end an epoch
            batches = list(islice(micro_batches, plan.micro_batches_per_step))
            learning_rate = float(scheduler.get_last_lr()[0])
            inputs = [to_device(batch, model, world) for batch in batches]
            losses, norm = train_step(
                wrapped, inputs, step, optimization=optimization, strategy=strategy, settings=settings
            )
            step += 1
            # 7. AFTER EACH STEP the record adds it to steps.jsonl and saves a checkpoint if one is due. `losses` are
            #    those of this rank only, and stay on the device: a collective in every step would delay training for
            #    a number that is only displayed. If any rank has been asked to stop, all ranks stop here.
            if record.after_step(step, losses, norm, learning_rate=learning_rate, batches=batches):
                evaluate_during_training(step, prepared, record)
                if record.early_stopping.stops:  # every rank has the same scores, so all ranks stop here
                    break
    record.best.load(state)


def evaluate_during_training(step: int, prepared: Preparation, record: RunRecord) -> None:
    """Evaluate after a step, and keep the weights if they are the best so far."""
    scores, _ = evaluate(prepared.model, prepared.eval_set, prepared.settings, world=prepared.world)
    record.after_evaluation(step, prepared.eval_set.name, asdict(scores))


# 8. EXACT EVALUATION.
@torch.no_grad()
def evaluate(
    model: PreTrainedModel, eval_set: EvalSet, settings: Settings, *, world: World
) -> tuple[Scores, NDArray[np.float64]]:
    """Score an eval set, each of its n rows exactly once. Collective.

    Args:
        model: the plain model. DDP's wrapper would broadcast the buffers again before every batch.
        eval_set: all rows of the set, and this rank's share of them.

    Returns:
        The scores, and the logits, float64 (n, classes), in row order: the same on every rank.
    """
    model.eval()
    # Buffers such as BatchNorm's statistics differ between ranks after a step. Use rank 0's, which are also saved.
    broadcast_buffers(model, world)
    # Allocated at once: small results between the memory of the batches would keep it from being used again.
    shard = torch.empty(
        len(eval_set.positions), len(model.config.id2label or ()), dtype=torch.float64, device=world.device
    )
    n_done = 0  # rows of this rank
    counts = torch.zeros(2, dtype=torch.int64, device=world.device)  # correct rows, rows
    for batch, is_filler in zip(eval_set.loader, eval_set.is_filler, strict=True):
        inputs = to_device(batch, model, world)
        labels = inputs.pop("labels")
        with mixed_precision(settings.precision, world.device):
            logits = model(**inputs).logits
        if is_filler:  # this rank has no rows left; it only takes part in the forward pass, which may be collective
            continue
        counts[0] += (logits.argmax(dim=1) == labels).sum()
        counts[1] += len(labels)
        shard[n_done : n_done + len(labels)] = logits  # on the device: a copy to the host would wait for each batch
        n_done += len(labels)

    # Summing counts over the ranks is exact. Averaging the ranks' accuracies would not be, because one rank may have a
    # row more than another. DistributedSampler would make the shares equal by repeating rows, which count twice then.
    dist.all_reduce(counts)
    wait_for_device(world)
    correct, n = counts.tolist()
    assert n == len(eval_set.labels), f"{n} rows were evaluated, not {len(eval_set.labels)}"

    gathered = gather_rows(eval_set.positions, shard, n, world=world)
    scores = score(gathered, eval_set.labels, eval_set.positive_class)
    assert correct == round(scores.accuracy * n), f"{correct} rows were counted as correct, but {scores}"
    return scores, gathered


if __name__ == "__main__":
    Program(__doc__).launch(main)
