"""Handwritten digits with a plain DDP loop: torchrun --standalone --nproc_per_node=2 plain_loop.py"""

import hashlib

import torch
import torch.distributed as dist
from samebits.fixed_tree import FixedTree, FixedTreeSampler
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))

torch.manual_seed(0)  # the initial weights
layers = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(16 * 36, 10)]
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tree = FixedTree(model, logical_ranks=4, threads=1)
sampler = FixedTreeSampler(dataset, batch_size=64, logical_ranks=4)
loader = DataLoader(dataset, batch_sampler=sampler)

for epoch in range(2):
    sampler.set_epoch(epoch)
    batches = iter(loader)
    for step in range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch):
        for logical_rank in tree.logical_ranks:
            with tree.micro_batch(step, logical_rank, seed=42):
                x, y = next(batches)
                nn.functional.cross_entropy(model(x), y).backward()  # the mean over the rows of the micro-batch
        tree.clip_grad_norm_(1.0)
        optimizer.step()

if dist.get_rank() == 0:
    print(hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.module.state_dict().values())).hexdigest())
dist.destroy_process_group()
