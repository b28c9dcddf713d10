"""Folders of finished runs, written without training, for tests of the code that reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from helpers.reviews import read_reviews
from safetensors.numpy import save_file

from app.data.split import split_reviews
from app.runs.csv_escape import escape
from app.runs.schema import EVALUATIONS, METRICS, MODEL, MODEL_FOLDER, PREDICTIONS, SETTINGS, SPLIT, STEPS

DEFAULTS = {"text_column": "review", "label_column": "label", "test_size": 0.25, "validation_size": 0.0, "seed": 42}
DEFAULTS |= {"learning_rate": 1e-3, "world_size": 2, "devices": ["cpu", "cpu"], "versions": {"python": "3.11"}}


def write_run(
    folder: Path, reviews: Path, *, path: str = "ddp_loop", rng_seed: int = 0, steps: int = 12, **settings: Any
) -> Path:
    """Write the folder of a run.

    Args:
        reviews: the CSV file.
        rng_seed: the seed of losses, probabilities and weights; runs with the same seed are equal.
    """
    draw = np.random.default_rng(rng_seed)
    settings = DEFAULTS | {"csv": str(reviews), "cache_dir": str(folder.parent / "cache"), "path": path} | settings
    table = read_reviews(reviews, settings["text_column"], settings["label_column"])
    split = split_reviews(table, **{name: settings[name] for name in ("test_size", "validation_size", "seed")})
    names, labels = np.array(table.class_names, dtype=object), table.labels[split.test]
    n = len(labels)
    logits = draw.normal(size=(n, len(names))) + 1.5 * np.eye(len(names))[labels]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    predicted = probabilities.argmax(axis=1)

    (folder / MODEL_FOLDER).mkdir(parents=True)
    write_json(folder / SETTINGS.name, settings)
    of_split = {"csv": reviews.name, "classes": names.tolist(), "n_test": n, "seed": settings["seed"]}
    write_json(folder / SPLIT.name, of_split | {"fingerprint": split.fingerprint, "csv_escape": "'"})
    losses, norms = 0.7 * draw.uniform(0.5, 1, steps), draw.uniform(1, 2, steps)
    lines = [
        {"step": step, "epoch": step / steps, "loss": loss, "grad_norm": norm, "learning_rate": 1e-3}
        | {"examples": 32, "tokens": 900, "padded_tokens": 1000, "seconds": 0.1}
        for step, (loss, norm) in enumerate(zip(losses.tolist(), norms.tolist(), strict=True), start=1)
    ]
    (folder / STEPS.name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = {"accuracy": float((predicted == labels).mean()), "f1": 0.5, "loss": 0.4}
    evaluation = {"step": steps, "epoch": 1.0, "rows": "test", "n": n} | metrics
    (folder / EVALUATIONS.name).write_text(json.dumps(evaluation) + "\n")
    speed = {"train_seconds": 2.0, "train_examples_per_second": 160.0, "peak_memory_bytes": [2**28, 2**28]}
    write_json(folder / METRICS.name, metrics | {"n_test": n} | speed)
    predictions = {"row": np.asarray(table.rows)[split.test], "label": names[labels], "predicted": names[predicted]}
    predictions |= {f"probability_{name}": probabilities[:, i] for i, name in enumerate(names)}
    predictions["review"] = table.texts.iloc[split.test].to_numpy()
    cells = pd.DataFrame({escape(name): column for name, column in predictions.items()})
    for name in ("label", "predicted", "review"):
        cells[name] = cells[name].map(escape)
    cells.to_csv(folder / PREDICTIONS, index=False)
    weights = {"layer.weight": draw.normal(size=(3, 4)).astype(np.float32), "layer.bias": np.zeros(3, np.float32)}
    save_file(weights, folder / MODEL_FOLDER / MODEL, {"format": "pt"})
    return folder


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def edit_json(file: Path, **changes: Any) -> None:
    """Change values in a JSON file."""
    write_json(file, json.loads(file.read_text("utf-8")) | changes)


def edit_step(folder: Path, number: int, **changes: Any) -> None:
    """Change values in one line of steps.jsonl."""
    file = folder / STEPS.name
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[number - 1] |= changes
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
