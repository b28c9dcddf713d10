"""The cells of the parity table, and that one difference fails it. The cells are trained in tests/launched."""

from __future__ import annotations

import sys

import pytest
import torch
from helpers.run_folders import write_run

from app.experiments import train_pair
from app.experiments.parity_table import main, parse
from app.runs.reader import read_run


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """A function that runs the program in this process; returns its exit status, its output and its error lines."""

    def run(*flags: str) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "argv", ["parity_table", *flags, f"--output_dir={tmp_path / 'table'}"])
        status = main()
        out, err = capsys.readouterr()
        return status, out, err.splitlines()

    return run


@pytest.mark.parametrize("differs", [False, True])
def test_a_single_cell_that_differs_fails_the_table(review_csv, monkeypatch, call, differs):
    def train_path(path_name, settings, ranks, folder):
        odd = differs and (path_name, ranks, settings.precision) == ("trainer_run", 3, "bf16")
        return read_run(write_run(folder, review_csv(), path=path_name, rng_seed=int(odd)))

    monkeypatch.setattr(train_pair, "train_path", train_path)
    status, out, _ = call("--only=1,1,random,fp32", "--only=3,2,random,bf16")
    assert status == int(differs)
    assert f"bitwise identical in both paths: {1 if differs else 2} of 2 cells\n" in out
    assert "| 1 | 1 | random | fp32 | 12 | 1 | none |" in out
    assert ("| 3 | 2 | random | bf16 | 12 | 1 | step 1: the loss is " in out) == differs


def test_the_table_has_every_combination_once(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["parity_table"])
    cells, settings = parse()
    assert len(cells) == len(set(cells)) == 3 * 3 * 2 * 2
    assert all(settings.train_batch_size % (ranks * accumulation) == 0 for ranks, accumulation, *_ in cells)


def test_flags_shorten_the_runs_of_a_cell(monkeypatch):
    flags = ["--only=2,4,random,bf16", "--max_steps=8", "--train_batch_size=16", "--eval_steps=3"]
    monkeypatch.setattr(sys, "argv", ["parity_table", *flags])
    cells, settings = parse()
    assert cells == [(2, 4, "random", "bf16")]
    assert (settings.max_steps, settings.train_batch_size, settings.eval_steps) == (8, 16, 3)
    assert settings.dropout == 0.1, "what no flag changes stays as in the table"


@pytest.mark.parametrize("cell", ["4,1,random,fp32", "1,1,random", "x" * 500])
def test_a_cell_that_is_not_in_the_table_is_one_line(call, tmp_path, cell):
    status, _, lines = call("--only", cell)
    assert (status, len(lines)) == (2, 1)
    assert lines[0].startswith("error: --only ")
    assert "RANKS one of 1, 2, 3; " in lines[0]
    assert len(lines[0]) < 300
    assert not (tmp_path / "table").exists()


def test_more_ranks_than_gpus_are_one_line_before_anything_is_trained(monkeypatch, call, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    status, _, lines = call("--only=1,1,random,fp32", "--only=3,1,random,fp32")
    assert (status, len(lines)) == (2, 1)
    assert lines[0].startswith("error: --nproc_per_node 3: this machine has 1 GPU(s)")
    assert not (tmp_path / "table").exists()
