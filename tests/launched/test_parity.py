"""The two roads are the same training to the bit: cells of the table that app.experiments.parity_table fills."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest
from jobs import read_steps

# The first three have each value of each factor; with the slow ones, several ranks have each sampling and precision.
COVERING = [
    "1,4,group_by_length,bf16",
    "2,1,random,bf16",
    "3,2,random,fp32",
    pytest.param("2,4,group_by_length,fp32", marks=pytest.mark.slow),
    pytest.param("3,1,group_by_length,bf16", marks=pytest.mark.slow),
]


@pytest.mark.launched
@pytest.mark.parametrize("cell", COVERING)
def test_a_cell_is_equal_to_the_bit(launch, hotel_csv, tmp_path, cell):
    steps_per_epoch = int(pd.read_csv(hotel_csv)["review"].notna().sum() * 0.9 * 0.75) // 48  # as RECIPE divides them
    epochs = math.ceil(200 / steps_per_epoch)  # 2, the table's own, on the real CSV; more on the smaller sample
    flags = ["--only", cell, "--num_train_epochs", epochs, "--output_dir", "table"]
    done = launch("app.experiments.parity_table", "--csv", hotel_csv, *flags, limit=280)
    assert done.status == 0, done.out + done.err
    assert "1 of 1 cells bitwise identical" in (tmp_path / "table" / "parity.md").read_text()
    ranks, accumulation, sampling, precision = cell.split(",")
    for road in ("ddp_loop", "trainer_run"):
        folder = tmp_path / "table" / cell.replace(",", "-") / road
        settings = json.loads((folder / "settings.json").read_text())
        assert (settings["path"], settings["world_size"], settings["dropout"]) == (road, int(ranks), 0.1)
        assert settings["gradient_accumulation_steps"] == int(accumulation)
        assert (settings["train_sampling_strategy"], settings["precision"]) == (sampling, precision)
        steps = read_steps(folder)
        evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
        assert len(steps) == epochs * steps_per_epoch >= 200
        assert steps[-1]["epoch"] == epochs
        assert next((line["step"], line["rows"]) for line in evaluations) == (75, "validation")
        assert len(evaluations) > 1
