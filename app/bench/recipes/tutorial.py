"""The DDP loop of most tutorials: every row padded to the maximum length, in random order, fp32, plain Adam.

torchrun … tutorial.py CSV TEXT_COLUMN LABEL_COLUMN MODEL MAX_LENGTH BATCH_PER_RANK PRECISION STEPS OUTPUT.jsonl
"""

import os
import sys
import time
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

csv, text_column, label_column, folder = sys.argv[1:5]
max_length, batch_size, steps, output = int(sys.argv[5]), int(sys.argv[6]), int(sys.argv[8]), sys.argv[9]
device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
if device != "cpu":
    torch.cuda.set_device(device)
dist.init_process_group("gloo" if device == "cpu" else "nccl")
table = pd.read_csv(csv).dropna().sample(frac=0.9, random_state=0)
labels = table[label_column].astype("category").cat.codes
rows: Any = list(zip(table[text_column].astype(str), labels, strict=True))
tokenizer = AutoTokenizer.from_pretrained(folder)


def collate(batch: Any) -> dict[str, torch.Tensor]:
    texts, labels = zip(*batch, strict=True)
    encoded = tokenizer(list(texts), max_length=max_length, padding="max_length", truncation=True, return_tensors="pt")
    return dict(encoded) | {"labels": torch.tensor(labels, dtype=torch.long)}


sampler: Any = DistributedSampler(rows)
loader = DataLoader(rows, batch_size=batch_size, collate_fn=collate, sampler=sampler)
model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder)).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-5)
model.train()
counts: list[list[int]] = []
seconds: list[float] = []
began = time.perf_counter()
while len(counts) < steps:
    sampler.set_epoch(len(counts))
    for batch in loader:
        optimizer.zero_grad()
        model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss.backward()
        optimizer.step()
        if device != "cpu":
            torch.cuda.synchronize()
        mask, now = batch["attention_mask"], time.perf_counter()
        counts.append([len(mask), int(mask.sum()), mask.numel()])
        seconds.append(now - began)
        began = now
        if len(counts) == steps:
            break
summed = torch.tensor(counts, device=device)
dist.all_reduce(summed)
if dist.get_rank() == 0:
    table = pd.DataFrame(summed.tolist(), columns=["examples", "tokens", "padded_tokens"])
    table.assign(seconds=seconds).to_json(output, orient="records", lines=True)
del model
dist.destroy_process_group()
