"""The two roads are the same training to the bit: cells of the table that app.experiments.parity_table fills."""

from __future__ import annotations

import json
import math
import sys

import pandas as pd
import pytest
from jobs import read_steps
from run_folders import write_run

from app.experiments import parity_table
from app.runs.reader import read_run

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
    assert "1 of 1 cells equal to the bit" in (tmp_path / "table" / "parity.md").read_text()
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


@pytest.mark.parametrize("apart", [False, True])
def test_one_cell_that_differs_fails_the_table(review_csv, tmp_path, monkeypatch, capsys, apart):
    def train(road, settings, ranks, place):
        odd = apart and (road, ranks, settings.precision) == ("trainer_run", 3, "bf16")
        return read_run(write_run(place / road, review_csv(), path=road, chance=int(odd)))

    monkeypatch.setattr(parity_table, "train", train)
    cells = ["1,1,random,fp32", "3,2,random,bf16"]
    flags = [f"--only={cell}" for cell in cells] + [f"--output_dir={tmp_path / 'table'}"]
    monkeypatch.setattr(sys, "argv", ["parity_table", *flags])
    assert parity_table.main() == int(apart)
    out = capsys.readouterr().out
    assert f"{2 - apart} of 2 cells equal to the bit" in out
    assert ("| 3 | 2 | random | bf16 | 12 | 1 | step 1: the loss is " in out) == apart


def test_the_table_has_every_combination_and_no_other_cell(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["parity_table"])
    cells, settings = parity_table.parse()
    assert len(cells) == len(set(cells)) == 3 * 3 * 2 * 2
    assert all(settings.train_batch_size % (ranks * accumulation) == 0 for ranks, accumulation, *_ in cells)
    monkeypatch.setattr(sys, "argv", ["parity_table", "--only", "4,1,random,fp32"])
    assert parity_table.main() == 2
