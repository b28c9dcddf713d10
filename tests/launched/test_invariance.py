"""Without logical ranks: both paths train the same bits, as a plain loop in one process does up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch
from helpers.jobs import TrainingRun, read_steps, require_success, write_subset
from launched.shared_jobs import SharedRuns
from transformers import get_linear_schedule_with_warmup

from app.model.built_in import embeddings_of
from app.model.dropout import RowDropout
from app.model.load import load_classifier, load_tokenizer
from app.runs.hashes import hash_results
from app.runs.reader import read_run
from app.settings import Settings
from app.training.build import read_and_split

pytestmark = [pytest.mark.launched, pytest.mark.slow]
PATHS = ("ddp_loop", "trainer_run")
ROWS = 1000  # 100 test rows, which 3 ranks cannot share equally
STEPS = 80  # two epochs of 37 batches, and some of the next
# The largest relative difference of two losses: rounding adds up over the steps, because matrices have other sizes and
# sums another order.
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-4}
RECIPE = {"max_steps": STEPS, "train_batch_size": 24, "max_length": 32, "dropout": 0.05}
RECIPE |= {"train_sampling_strategy": "random", "model": "tiny-bert"}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {"class_weights": "1.5,0.7", "label_smoothing_factor": 0.1, "gradient_accumulation_steps": 3},
    # What the plain loop does not do: only the paths are compared.
    "power_sgd": {"ddp_comm_hook": "power_sgd", "max_steps": 8},
    "bf16": {"train_sampling_strategy": "group_by_length", "max_steps": 8},
    # With three ranks, the order in which gradients are added depends on their position in a bucket.
    "buckets": {"ddp_bucket_cap_mb": 1, "max_steps": 8},
}
JOB = {1: "one_rank", 2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}


class Cell(NamedTuple):
    ranks: int
    variant: str
    precision: str = "fp64"

    @property
    def settings(self) -> dict[str, Any]:
        return RECIPE | {"precision": self.precision} | VARIANTS[self.variant]

    def name(self, path: str) -> str:
        return f"{self.ranks}-{self.variant}-{self.precision}-{path}"

    def run(self, path: str) -> TrainingRun:
        flags = [f"--{name}={value}" for name, value in self.settings.items()]
        return TrainingRun(path, ["--csv=reviews.csv", "--eval_strategy=no", "--save_strategy=no", *flags])


LIKE_A_PLAIN_LOOP = [*(Cell(ranks, "plain") for ranks in JOB), Cell(3, "plain", "fp32")]
LIKE_A_PLAIN_LOOP += [Cell(2, "weighted"), Cell(4, "weighted")]
OTHERS = [
    Cell(2, "power_sgd", "fp32"),
    Cell(4, "power_sgd", "fp32"),
    Cell(3, "bf16", "bf16"),
    Cell(3, "buckets", "fp32"),
]
SHARED_RUNS: SharedRuns = {job: {} for job in JOB.values()}
for cell in LIKE_A_PLAIN_LOOP + OTHERS:
    SHARED_RUNS[JOB[cell.ranks]] |= {cell.name(path): cell.run(path) for path in PATHS}


def write_inputs(folder: Path, csv: Path) -> None:
    write_subset(csv, folder / "reviews.csv", ROWS)


@pytest.fixture(scope="module")
def trained(trained_by, shared_folder) -> Callable[[Cell], list[Path]]:
    """A function that returns the folders of a cell's run in each path."""

    def train(cell: Cell) -> list[Path]:
        outcomes = trained_by(JOB[cell.ranks])
        require_success({cell.name(path): outcomes[cell.name(path)] for path in PATHS})
        return [shared_folder / cell.name(path) for path in PATHS]

    return train


@pytest.mark.parametrize("cell", LIKE_A_PLAIN_LOOP + OTHERS, ids=str)
def test_both_paths_are_bitwise_identical(trained, cell):
    a, b = trained(cell)
    assert hash_results(a) == hash_results(b)
    settings = [read_run(folder).settings for folder in (a, b)]
    assert [(s["path"], s["world_size"]) for s in settings] == [(path, cell.ranks) for path in PATHS]


@cache
def plain_loop(variant: str, precision: str, csv: Path) -> tuple[list[float], list[int]]:
    return train_plainly(Settings(**Cell(1, variant, precision).settings, csv=str(csv)))


@pytest.mark.parametrize("cell", LIKE_A_PLAIN_LOOP, ids=str)
def test_any_number_of_ranks_trains_like_a_plain_loop(trained, cell):
    run = trained(cell)[0]
    losses, predicted = plain_loop(cell.variant, cell.precision, run.parent / "reviews.csv")
    assert len(losses) == STEPS
    assert losses[-1] < losses[0], "the model must have learned something"
    assert len(set(predicted)) == 2
    found = [step["loss"] for step in read_steps(run)]
    difference = max(abs(x - y) / abs(y) for x, y in zip(found, losses, strict=True))
    print(f"{cell}: largest relative difference of a loss {difference:.1e}")
    assert difference <= TOLERANCE[cell.precision] / 2  # then any two runs differ by at most the tolerance
    predictions = pd.read_csv(run / "predictions.csv")
    assert predictions["predicted"].tolist() == predicted
    assert len(predictions) == predictions["row"].nunique() == ROWS * 0.1, "each test row once"


def train_plainly(settings: Settings) -> tuple[list[float], list[int]]:
    """Train `settings.max_steps` steps in one process, with a linear schedule, AdamW and clipping.

    Rows, tokens, initial weights and dropout masks are those of `app`; this loop shuffles, pads, schedules and
    optimizes without its code.

    Returns:
        The loss of each step, and the class id predicted for each test row in file order.
    """
    table, split, _ = read_and_split(settings, 1)
    texts = table.texts.iloc[split.train]
    tokenizer = load_tokenizer(settings, texts)
    embeddings = embeddings_of(settings.model, tokenizer, texts)
    model = load_classifier(settings, table.class_names, tokenizer, embeddings=embeddings).model

    def logits_of(rows):
        padded = {"truncation": True, "padding": True, "max_length": settings.max_length, "return_tensors": "pt"}
        return model(**tokenizer(table.texts.iloc[rows].tolist(), **padded)).logits

    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    size, steps = settings.train_batch_size, settings.max_steps
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
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
        with RowDropout(settings.seed, step, range(size)):
            logits = logits_of(rows)
        loss = criterion(logits, torch.from_numpy(table.labels[rows]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        predicted = [logits_of(part).argmax(dim=1) for part in torch.from_numpy(split.test).split(64)]
    return losses, torch.cat(predicted).tolist()
