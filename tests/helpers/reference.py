"""A plain PyTorch loop in one process, which training at any number of ranks has to agree with.

It takes rows, tokens, initial weights and dropout masks from `app`, but shuffles, pads, schedules and optimizes with
its own code.
"""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pad_sequence

from app.data.split import split_reviews
from app.model.built_in import embeddings_of
from app.model.dropout import RowDropout
from app.model.load import load_classifier, load_tokenizer
from app.settings import Settings
from helpers.reviews import read_reviews


def train_plainly(settings: Settings) -> tuple[list[float], list[int]]:
    """Train `settings.max_steps` steps with a linear schedule, AdamW and clipping.

    Returns:
        The loss of each step, and the class id predicted for each test row in file order.
    """
    table = read_reviews(settings.csv_path, "review", "label")
    split = split_reviews(
        table, test_size=settings.test_size, validation_size=settings.validation_size, seed=settings.seed
    )
    texts = table.texts.iloc[split.train]
    tokenizer = load_tokenizer(settings, texts)
    embeddings = embeddings_of(settings.model, tokenizer, texts)
    model = load_classifier(settings, table.class_names, tokenizer, embeddings=embeddings).model

    def logits_of(rows):
        ids = tokenizer(table.texts.iloc[rows].tolist(), truncation=True, max_length=settings.max_length)["input_ids"]
        padded = pad_sequence([torch.tensor(row) for row in ids], True, tokenizer.pad_token_id)
        mask = pad_sequence([torch.ones(len(row), dtype=torch.int64) for row in ids], True)
        return model(input_ids=padded, attention_mask=mask).logits

    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
    size, steps, warmup = settings.train_batch_size, settings.max_steps, settings.max_steps // 10
    steps_per_epoch = len(split.train) // size
    weights = None
    if settings.class_weights is not None:
        weights = torch.tensor([*map(float, settings.class_weights.split(","))], dtype=model.dtype)
    criterion = torch.nn.CrossEntropyLoss(weights, label_smoothing=settings.label_smoothing_factor)
    losses = []
    model.train()
    for step in range(steps):
        epoch, batch = divmod(step, steps_per_epoch)
        order = torch.randperm(len(split.train), generator=torch.Generator().manual_seed(settings.seed + epoch))
        rows = split.train[order[batch * size : (batch + 1) * size].numpy()]
        share = step / warmup if step < warmup else (steps - step) / (steps - warmup)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 1e-3 * share
        with RowDropout(settings.seed, step, range(size)):
            logits = logits_of(rows)
        loss = criterion(logits, torch.from_numpy(table.labels[rows]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        predicted = [logits_of(part).argmax(dim=1) for part in torch.from_numpy(split.test).split(64)]
    return losses, torch.cat(predicted).tolist()
