"""Handwritten digits with transformers.Trainer: torchrun --standalone --nproc_per_node=2 with_trainer.py"""

import hashlib
import tempfile

import torch
from samebits.fixed_tree_trainer import FixedTreeTrainerMixin
from sklearn.datasets import load_digits
from torch import nn
from transformers import Trainer, TrainingArguments


class Classifier(nn.Sequential):
    def forward(self, pixels, labels):
        logits = super().forward(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class TreeTrainer(FixedTreeTrainerMixin, Trainer):
    logical_ranks, threads = 4, 1


images, labels = load_digits(return_X_y=True)
pixels = torch.tensor(images, dtype=torch.float32) / 16
dataset = [{"pixels": row, "labels": label} for row, label in zip(pixels, labels.tolist(), strict=True)]
torch.manual_seed(0)  # the initial weights
model = Classifier(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 10))
with tempfile.TemporaryDirectory() as folder:
    # The batch size is that of a logical rank: 64 rows per step, with any number of processes.
    args = TrainingArguments(folder, per_device_train_batch_size=16, num_train_epochs=2, use_cpu=True)
    args.learning_rate, args.report_to, args.disable_tqdm = 1e-2, [], True
    trainer = TreeTrainer(model, args, train_dataset=dataset)
    trainer.train()
if trainer.is_world_process_zero():
    print(hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest())
