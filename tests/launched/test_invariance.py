"""Without logical ranks: both paths train the same bits, as a plain loop in one process does up to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch
from helpers.jobs import TrainingRun, read_steps, require_success, write_subset
from helpers.reviews import read_reviews
from launched.shared_jobs import SharedRuns
from sklearn.metrics import accuracy_score
from torch.nn.utils.rnn import pad_sequence

from app.data.split import split_reviews
from app.model.built_in import embeddings_of
from app.model.dropout import RowDropout
from app.model.load import load_classifier, load_tokenizer
from app.runs.hashes import hash_results
from app.runs.reader import read_run
from app.settings import Settings

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


PLAIN = [Cell(1, "plain"), Cell(2, "plain"), Cell(3, "plain"), Cell(4, "plain")]
LIKE_A_PLAIN_LOOP = [*PLAIN, Cell(3, "plain", "fp32"), Cell(2, "weighted"), Cell(4, "weighted")]
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


@pytest.fixture(scope="module")
def plain_loop(trained, shared_folder) -> Callable[[Cell], tuple[list[float], list[int]]]:
    """A function that returns the losses and predicted classes of the plain loop."""
    trained(PLAIN[0])  # writes the reviews

    @cache
    def train(variant: str, precision: str) -> tuple[list[float], list[int]]:
        settings = Cell(1, variant, precision).settings
        return train_plainly(Settings(**settings, csv=str(shared_folder / "reviews.csv")))

    return lambda cell: train(cell.variant, cell.precision)


@pytest.mark.parametrize("cell", LIKE_A_PLAIN_LOOP + OTHERS, ids=str)
def test_both_paths_are_bitwise_identical(trained, cell):
    a, b = trained(cell)
    assert hash_results(a) == hash_results(b)
    runs = [read_run(folder) for folder in (a, b)]
    assert [(run.settings["path"], run.settings["world_size"]) for run in runs] == [(p, cell.ranks) for p in PATHS]
    assert [len(run.metrics["peak_memory_bytes"]) for run in runs] == [cell.ranks] * 2
    # They also write the same config, of the model and of the tokenizer.
    for file in (a / "model").glob("*config.json"):
        assert file.read_bytes() == (b / "model" / file.name).read_bytes(), file


@pytest.mark.parametrize("cell", LIKE_A_PLAIN_LOOP, ids=str)
def test_any_number_of_ranks_trains_like_a_plain_loop(trained, plain_loop, cell):
    losses, predicted = plain_loop(cell)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0], "the model must have learned something"
    assert len(set(predicted)) == 2
    run = trained(cell)[0]
    found = [step["loss"] for step in read_steps(run)]
    difference = max(abs(x - y) / abs(y) for x, y in zip(found, losses, strict=True))
    print(f"{cell}: largest relative difference of a loss {difference:.1e}")
    assert difference <= TOLERANCE[cell.precision] / 2  # then any two runs differ by at most the tolerance
    assert pd.read_csv(run / "predictions.csv")["predicted"].tolist() == predicted


@pytest.mark.parametrize("cell", PLAIN, ids=str)
def test_each_test_row_is_predicted_once_and_scored_as_scikit_learn_does(trained, cell):
    for folder in trained(cell):
        run, source = read_run(folder), pd.read_csv(folder.parent / "reviews.csv")
        rows = run.predictions["row"]
        assert len(rows) == rows.nunique() == run.metrics["n_test"] == math.ceil(ROWS * 0.1)  # --test_size
        assert rows.is_monotonic_increasing
        predictions = pd.read_csv(folder / "predictions.csv")
        assert (source["label"].loc[rows].to_numpy() == predictions["label"].to_numpy()).all()
        assert run.metrics["accuracy"] == accuracy_score(predictions["label"], predictions["predicted"])


@pytest.mark.parametrize("cell", PLAIN[1:], ids=str)
def test_any_number_of_ranks_trains_on_the_same_batches(trained, cell):
    names = ("step", "epoch", "examples", "tokens", "learning_rate")
    expected = read_steps(trained(PLAIN[0])[0])
    assert len({step["tokens"] for step in expected}) > 1
    for ours, theirs in zip(read_steps(trained(cell)[0]), expected, strict=True):
        assert [ours[name] for name in names] == [theirs[name] for name in names]
        assert math.isclose(ours["grad_norm"], theirs["grad_norm"], rel_tol=1e-6)


def train_plainly(settings: Settings) -> tuple[list[float], list[int]]:
    """Train `settings.max_steps` steps in one process, with a linear schedule, AdamW and clipping.

    Rows, tokens, initial weights and dropout masks are those of `app`; this loop shuffles, pads, schedules and
    optimizes with its own code.

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
