"""Fine-tune a text classifier with PyTorch DDP, the loop written out by hand. Read it from top to bottom.

Two processes on this machine, which work on halves of the same batches:

    torchrun --nproc_per_node=2 -m app.ddp_loop

One process (a breakpoint works), your own file, and a model from the Hugging Face Hub:

    python -m app.ddp_loop --csv reviews.csv --text_column text --model bert-base-chinese

Two machines with 8 GPUs each; on the second one --node_rank=1:

    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=10.0.0.1 --master_port=29500 -m app.ddp_loop

torchrun starts the same program in every process. A process learns from its environment which `rank` it is, of how many
(`world_size`), and everything else follows: which rows it sees, with whom it averages gradients, who writes the files.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import set_seed

from app.checkpoint.state import build_buckets, read_training_state, write_training_state
from app.cli import launch
from app.distributed.collectives import broadcast_buffers, gather_rows, reduce_sum
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
    # 1. THE PROCESS GROUP. From here to the end of the block the ranks can talk: NCCL between GPUs, gloo between CPUs.
    with join(settings) as world:
        fine_tune(settings, world)


def fine_tune(settings: Settings, world: World) -> None:
    # The same on every rank: rows, split, tokens, and weights drawn from the seed.
    prepared = prepare("ddp_loop", settings, world)
    with StopRequest(world) as stop, prepared.record.locate_failures():
        ddp = train(prepared, settings, world, stop)

        # 7. THE RESULT, on the test rows, which nothing has been selected on.
        scores, logits = evaluate(ddp, prepared.test_loader, prepared.test_labels, settings, world)
        prepared.record.finish(DDP(settings, world), ddp.module, prepared.tokenizer, logits, scores)
    world.print_main(closing_block(scores, prepared.record))


def train(prepared: Preparation, settings: Settings, world: World, stop: StopRequest) -> DistributedDataParallel:
    plan, record, loader = prepared.plan, prepared.record, prepared.train_loader

    # 2. THE MODEL. Every rank holds a whole copy. DDP sends rank 0's weights to all, then hooks into backward(): as
    #    soon as the gradients of a bucket of parameters are ready, it averages them over the ranks, while backward()
    #    goes on.
    ddp = DistributedDataParallel(
        prepared.model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        find_unused_parameters=settings.ddp_find_unused_parameters,
        bucket_cap_mb=settings.ddp_bucket_cap_mb,
    )
    # Averaged gradients are equal on every rank, so the same optimizer does the same everywhere: the copies stay equal.
    optimizer = build_optimizer(ddp, settings, prepared.learning_rate)
    scheduler = build_scheduler(optimizer, settings, plan.total_steps)

    # 3. RANDOMNESS. Until here the ranks had to be equal; their dropout must not be: other rows, other masks.
    set_seed(settings.seed + world.rank)

    step = prepared.resume.step  # 0, unless the run resumes from a checkpoint
    if prepared.resume.checkpoint is not None:
        with mixed_precision(settings, world):
            build_buckets(ddp, to_device(next(iter(loader)), world), world)
        read_training_state(prepared.resume, ddp.module, optimizer, scheduler, world)
    if record.begin(plan):  # a resumed run first repeats the evaluation that follows its checkpoint
        watch(ddp, step, prepared, settings, world)
    bar = tqdm(
        total=plan.total_steps, initial=step, unit=" steps", disable=settings.disable_tqdm or not world.is_main_process
    )
    for epoch in range(step // plan.steps_per_epoch, plan.epochs):
        # 4. THE DATA. The sampler deals each rank its rows of the epoch's permutation, which is the same on every rank.
        #    Without set_epoch every epoch would have the order of the first.
        steps_done = step % plan.steps_per_epoch
        loader.sampler.set_epoch(epoch, steps_done)  # type: ignore[attr-defined]
        micro_batches = iter(loader)

        for _ in range(min(plan.steps_per_epoch - steps_done, plan.total_steps - step)):
            # 5. ONE OPTIMIZER STEP: global batch = ranks x micro-batch x accumulation steps.
            ddp.train()
            batches = list(islice(micro_batches, plan.accumulation_steps))
            loss = torch.zeros((), device=world.device)
            for number, batch in enumerate(batches, start=1):
                # Gradients add up locally; only the last backward() of the step lets DDP average them over the ranks.
                last = number == plan.accumulation_steps
                with nullcontext() if last else ddp.no_sync():
                    with mixed_precision(settings, world):
                        micro_loss = ddp(**to_device(batch, world)).loss
                    # The model's loss is a mean over its rows. Micro-batches have equal size, so the mean of their
                    # means is the mean over the batch; DDP's average over the ranks makes it the mean over the global
                    # batch.
                    micro_loss = micro_loss / plan.accumulation_steps
                    micro_loss.backward()
                loss = loss + micro_loss.detach()

            # All ranks clip by the same norm: it is that of the averaged gradients. 0 stands for "never clip".
            norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), settings.max_grad_norm or float("inf"))
            prepared.guard_step(step + 1, optimizer, norm)  # a norm that is not finite lets the device skip the step
            optimizer.step()
            learning_rate = float(scheduler.get_last_lr()[0])
            scheduler.step()
            optimizer.zero_grad()
            step += 1

            # `loss` is this rank's. Averaging it over the ranks costs a round of messages, for the eye only, so it is
            # kept and reduced once an interval: all_reduce(AVG), or SUM over world size where a backend has no AVG.
            record.add_step(step, step / plan.steps_per_epoch, loss, norm, learning_rate, batches)
            if step % settings.logging_steps == 0 or step == plan.total_steps:
                record.write_steps()
                bar.set_postfix(loss=f"{record.last_loss:.4f}", refresh=False)
            bar.update()

            # If any rank is asked to stop (SIGTERM, SIGUSR1, Ctrl-C), all ranks stop after the same step, with a
            # checkpoint. It is written before the evaluation, which may take longer than the time that is left.
            stop_requested = stop.agreed()
            if stop_requested or plan.due(settings.save_strategy, settings.save_steps, step):
                record.save_checkpoint(step, partial(write_training_state, ddp.module, optimizer, scheduler, world))
            if stop_requested and step < plan.total_steps:
                raise record.preempted(step)
            if plan.due(settings.eval_strategy, settings.eval_steps, step):
                watch(ddp, step, prepared, settings, world)
    bar.close()
    record.load_best(DDP(settings, world), ddp.module)
    return ddp


# 6. EXACT EVALUATION.
@torch.no_grad()
def evaluate(
    ddp: DistributedDataParallel, loader: DataLoader[Any], labels: NDArray[np.int64], settings: Settings, world: World
) -> tuple[Scores, NDArray[np.float64]]:
    """Scores of the n rows whose class ids are `labels`, and their logits, float64 (n, classes) in row order: each row
    counted once, on every rank the same.

    Each rank takes its share of the rows. Shares may differ by a row, so the forward pass goes through `ddp.module`:
    the DDP wrapper would begin a collective (it broadcasts buffers) that a rank with nothing left to do never joins.
    """
    ddp.eval()
    broadcast_buffers(ddp.module, world)
    shard: list[torch.Tensor] = []
    counts = torch.zeros(2, dtype=torch.int64, device=world.device)  # rows that were right, rows
    for batch in loader:
        batch = to_device(batch, world)
        targets = batch.pop("labels")
        with mixed_precision(settings, world):
            logits = ddp.module(**batch).logits
        counts[0] += (logits.argmax(dim=1) == targets).sum()
        counts[1] += len(targets)
        shard.append(logits.double().cpu())

    # The ranks' counts add up to those of the whole: no mean of means, no row padded in to make the shares equal.
    right, n = reduce_sum(counts, world).tolist()
    assert n == len(labels), f"{n} rows were evaluated, not {len(labels)}"

    logits = gather_rows(list(loader.sampler), shard, n, world)
    scores = score(logits, labels)
    assert right == round(scores.accuracy * n), f"the ranks counted {right} hits, the gathered rows have {scores}"
    return scores, logits


def watch(ddp: DistributedDataParallel, step: int, prepared: Preparation, settings: Settings, world: World) -> None:
    """Evaluates in mid-training: on the validation rows where there are any, else on the test rows, for the eye
    only."""
    record = prepared.record
    record.write_steps()
    scores, _ = evaluate(ddp, prepared.watched_loader, prepared.watched_labels, settings, world)
    record.write_evaluation(step, step / prepared.plan.steps_per_epoch, prepared.watched, scores.n, asdict(scores))
    record.keep_best(step, DDP(settings, world), ddp.module, asdict(scores))
    record.start_clock()


def mixed_precision(settings: Settings, world: World) -> AbstractContextManager[Any]:
    """bf16: matrix products in bfloat16, weights and optimizer in fp32."""
    return torch.autocast(world.device.type, dtype=torch.bfloat16, enabled=settings.bf16)


def to_device(batch: dict[str, torch.Tensor], world: World) -> dict[str, torch.Tensor]:
    return {name: tensor.to(world.device, non_blocking=True) for name, tensor in batch.items()}


if __name__ == "__main__":
    launch(main, __doc__)
