"""All of DDP (distributed data parallel training) on one page, in PyTorch's own names.

    torchrun --standalone --nproc_per_node=2 -m app.minimal --csv reviews.csv

torchrun starts two processes, the ranks, which train on halves of the same batches. Rank 0 prints a line per step, then
test accuracy and the SHA-256 of the weights, bitwise identical to app.ddp_loop's (docs/learn.md).
"""

if __name__ == "__main__":
    from .program import Program

    Program(__doc__, only=("csv", "max_steps", "train_batch_size")).check_command_line()

import gc
import json
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from datasets import Dataset
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import DataCollatorWithPadding

from .model.built_in import embeddings_of
from .model.dropout import RowDropout
from .model.identity import hash_weights
from .model.load import load_classifier, load_tokenizer
from .settings import Settings
from .strategies.base import sum_of_squares
from .strategies.optimization import VectorTails
from .strategies.reduction import sum_pairwise
from .training.build import read_and_split
from .training.step import build_scheduler, parameter_groups


def main(settings: Settings) -> None:
    settings = replace(settings, gradient_accumulation_steps=2)  # otherwise the defaults of app.ddp_loop

    # 1. THE PROCESS GROUP connects the ranks: over "gloo" if they use CPUs, as on this page, over "nccl" if each has a
    #    GPU. They communicate by collectives such as all_reduce, which every rank has to call in the same order.
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)  # by default each rank would use all cores; the number also affects rounding

    # 2. THE DATA. Every rank reads all rows. Its sampler selects its share of a permutation that is the same on every
    #    rank: each world_size-th row. With drop_last, no row is repeated to make the shares equal.
    table, split, plan = read_and_split(settings, world_size)
    texts, names = table.sample_texts(split.train), table.class_names  # test rows would be a leak
    tokenizer = load_tokenizer(settings, texts)
    tokens = tokenizer(table.texts.tolist(), truncation=True, max_length=settings.max_length)["input_ids"]
    rows = Dataset.from_dict({"input_ids": tokens, "labels": table.labels})
    train, test, collate = rows.select(split.train), rows.select(split.test), DataCollatorWithPadding(tokenizer)
    micro_batches = world_size * plan.accumulation_steps  # into which the global batch of a step is divided
    sampler: DistributedSampler[Dataset] = DistributedSampler(train, seed=settings.seed, drop_last=True)
    loader = DataLoader(train, settings.train_batch_size // micro_batches, sampler=sampler, collate_fn=collate)

    # 3. THE MODEL. Every rank holds all of it: DDP copies rank 0's weights to the others. Then it registers hooks that
    #    run during backward(): gradients are averaged over the ranks, while backward() computes further ones.
    model = load_classifier(settings, names, tokenizer, embeddings=embeddings_of("tiny", tokenizer, texts)).model
    ddp = DistributedDataParallel(model)
    if world_size > 2:  # without it, DDP adds more than two ranks in another order than app.ddp_loop: other rounding
        ddp.register_comm_hook(None, average_in_fixed_order)

    # 4. THE OPTIMIZER. All ranks get the same gradients, so they make the same update and their models stay equal.
    optimizer = torch.optim.AdamW(parameter_groups(model, settings.weight_decay), lr=1e-3, fused=True)
    VectorTails(optimizer)  # rounds the last elements of a tensor like the others, as app.ddp_loop does
    scheduler = build_scheduler(optimizer, settings, plan.total_steps)  # linear warmup and decay

    # 5. TRAINING. A step trains on one global batch: each rank on accumulation_steps micro-batches.
    ddp.train()
    for step in range(plan.total_steps):
        if step % plan.steps_per_epoch == 0:
            sampler.set_epoch(step // plan.steps_per_epoch)  # otherwise each epoch repeats the order of the first one
            batches = iter(loader)
        loss_sum = torch.zeros((), dtype=torch.float64)
        for number in range(plan.accumulation_steps):
            # backward() adds up gradients, on this rank only (no_sync). The last one averages the sums over the ranks.
            with ddp.no_sync() if number < plan.accumulation_steps - 1 else nullcontext():
                with RowDropout(settings.seed, step, plan.rows_of(rank, number)):  # other dropout masks for each row
                    loss = ddp(**next(batches)).loss  # the mean over a micro-batch; all have the same number of rows
                (loss / plan.accumulation_steps).backward()
            loss_sum += loss.detach()
        norm = sum_of_squares(p.grad for p in model.parameters() if p.grad is not None).sqrt().float()  # summed in fp64
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), settings.max_grad_norm, norm)  # after averaging
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        # 6. LOGGING. So far, loss_sum covers this rank's rows only. In fp64, the sum over all ranks is exact.
        dist.all_reduce(loss_sum)
        if rank == 0:
            print(json.dumps({"step": step + 1, "loss": loss_sum.item() / micro_batches, "grad_norm": norm.item()}))

    # 7. EXACT EVALUATION. The ranks take batches in turn. A DistributedSampler would repeat or drop rows. The plain
    #    model, because DDP's forward pass communicates: it would wait for a rank that has no batch left.
    model.eval().requires_grad_(False)
    counts = torch.zeros(2, dtype=torch.int64)  # correct rows, rows
    by_length = sorted(range(len(test)), key=lambda row: len(test[row]["input_ids"]))  # little padding in a batch
    eval_batches = [by_length[start : start + 64] for start in range(0, len(test), 64)]
    for batch in DataLoader(test, batch_sampler=eval_batches[rank::world_size], collate_fn=collate):
        correct = model(**batch).logits.argmax(dim=1) == batch["labels"]
        counts += torch.tensor([correct.sum(), len(correct)])
    dist.all_reduce(counts)  # exact, unlike a mean of the ranks' accuracies: their shares differ in size
    if rank == 0:
        print(json.dumps({"accuracy": counts[0].item() / counts[1].item(), "weights": hash_weights(model)}))
    del ddp, loss  # A DDP module that outlives the process group can abort the process at exit (pytorch#190489).
    gc.collect()
    dist.destroy_process_group()


def average_in_fixed_order(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average a bucket of gradients like app.ddp_loop: for four ranks ((g0 + g1) + (g2 + g3)) / 4."""
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    gathered = dist.all_gather(parts, bucket.buffer(), async_op=True)
    return gathered.get_future().then(lambda _: sum_pairwise(torch.stack(parts)) / len(parts))  # type: ignore[no-any-return]


if __name__ == "__main__":
    Program(__doc__, only=("csv", "max_steps", "train_batch_size")).launch(main)
