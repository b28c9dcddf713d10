"""`transformers.Trainer` with its own defaults, as its documentation writes it: rows padded to the longest of a batch.

torchrun … trainer_defaults.py CSV TEXT_COLUMN LABEL_COLUMN MODEL MAX_LENGTH BATCH_PER_RANK PRECISION STEPS OUTPUT.jsonl
"""

import os
import sys
import tempfile
import time
from typing import Any

import datasets
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

csv, text_column, label_column, folder = sys.argv[1:5]
max_length, batch_size, precision, steps, output = *map(int, sys.argv[5:7]), sys.argv[7], int(sys.argv[8]), sys.argv[9]
tokenizer = AutoTokenizer.from_pretrained(folder)
table = pd.read_csv(csv).dropna().sample(frac=0.9, random_state=0)
labels = table[label_column].astype("category").cat.codes.astype(int)
texts = table[text_column].astype(str).tolist()
encoded = tokenizer(texts, truncation=True, max_length=max_length)
rows = datasets.Dataset.from_dict({**encoded, "labels": labels.tolist()})
counts: list[list[int]] = []
moments: list[float] = []  # when each forward pass begins


def observe(_: Any, __: Any, inputs: dict[str, torch.Tensor]) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    moments.append(time.perf_counter())
    mask = inputs["attention_mask"]
    counts.append([len(mask), int(mask.sum()), mask.numel()])


model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder))
model.register_forward_pre_hook(observe, with_kwargs=True)
on_cpu = not torch.cuda.is_available()
with tempfile.TemporaryDirectory() as temporary:
    arguments = TrainingArguments(
        temporary,
        per_device_train_batch_size=batch_size,
        max_steps=steps + 1,  # a step ends when the next one begins
        bf16=precision == "bf16",
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else "nccl",
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model, arguments, data_collator=DataCollatorWithPadding(tokenizer), train_dataset=rows).train()
    summed = torch.tensor(counts[:steps], device=arguments.device)
    if dist.is_initialized():
        dist.all_reduce(summed)
if os.environ["RANK"] == "0":
    table = pd.DataFrame(summed.tolist(), columns=["examples", "tokens", "padded_tokens"])
    table.assign(seconds=np.diff(moments)).to_json(output, orient="records", lines=True)
