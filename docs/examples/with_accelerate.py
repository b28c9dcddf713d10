"""Handwritten digits with accelerate: torchrun --standalone --nproc_per_node=2 with_accelerate.py"""

import hashlib

import torch
from accelerate import Accelerator
from samebits.fixed_tree import FixedTree, FixedTreeSampler
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))

torch.manual_seed(0)  # the initial weights
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
sampler = FixedTreeSampler(dataset, batch_size=64, logical_ranks=4)
loader = DataLoader(dataset, batch_sampler=sampler)
# Neither the loader, which accelerate would divide again, nor the scheduler, which it would step once per process.
model, optimizer = accelerator.prepare(model, optimizer)
tree = FixedTree(model, logical_ranks=4, threads=1)

for epoch in range(2):
    sampler.set_epoch(epoch)
    batches = iter(loader)
    for step in range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch):
        for logical_rank in tree.logical_ranks:
            with tree.micro_batch(step, logical_rank, seed=42):
                x, y = (tensor.to(accelerator.device) for tensor in next(batches))
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
        tree.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()

weights = accelerator.unwrap_model(model).state_dict().values()
accelerator.print(hashlib.sha256(b"".join(t.cpu().numpy().tobytes() for t in weights)).hexdigest())
