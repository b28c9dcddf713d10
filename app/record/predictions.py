"""predictions.csv: a line per review, with the predicted class and the probability of each class."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray

from ..common.files import commit
from ..data.reviews import Indices, ReviewTable
from ..runs.csv_escape import escape
from ..runs.schema import prediction_columns

CHUNK = 10_000  # rows that are in memory at once


def write_predictions(
    path: Path, table: ReviewTable, part: Indices, *, logits: NDArray[np.floating[Any]], has_labels: bool = True
) -> None:
    """Write the predictions of some rows, in this order. The file is complete when it receives its name.

    Args:
        part: positions in the table, int64 (n,).
        logits: float (n, classes).
        has_labels: whether there is a column of labels; a row without one has an empty cell.
    """
    staging = path.with_name(f".{path.name}.tmp")
    with staging.open("w", encoding="utf-8", newline="") as file:
        write_lines(file, table, part, logits=logits, has_labels=has_labels)
    commit(staging, path)


def write_lines(
    file: TextIO, table: ReviewTable, part: Indices, *, logits: NDArray[np.floating[Any]], has_labels: bool = True
) -> None:
    """Write the header and the lines of `write_predictions`."""
    names = [escape(name) for name in table.class_names]
    writer = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(map(escape, prediction_columns(table.class_names, has_labels)))
    for start in range(0, len(part), CHUNK):
        chunk = slice(start, start + CHUNK)
        rows, labels, texts = table.rows[part[chunk]], table.labels[part[chunk]], table.texts_of(part[chunk])
        probabilities = torch.from_numpy(logits[chunk]).double().softmax(dim=1).numpy()
        predicted = logits[chunk].argmax(axis=1)
        for row, label, best, shares, text in zip(rows, labels, predicted, probabilities, texts, strict=True):
            label_cell = [names[label] if label >= 0 else ""] if has_labels else []
            writer.writerow([int(row), *label_cell, names[best], *shares.tolist(), escape(text)])
