"""Which cells the experiment trains, and how it ends."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from helpers.run_folders import write_run

from app.experiments import same_bits
from app.experiments.same_bits import build_cells, main, parse
from app.program import run_program


def test_every_combination_that_the_flags_select_is_trained_and_resumed_elsewhere(monkeypatch):
    def cells(*flags: str) -> list[same_bits.Cell]:
        monkeypatch.setattr(sys, "argv", ["same_bits", "--use_cpu", *flags])
        return build_cells(parse()[0], random.Random(0))

    all_cells = cells()
    assert len({str(cell) for cell in all_cells}) == 2 * 3 * 4 * 2
    killed = [cell for cell in all_cells if cell.resumed is not None]
    assert len(killed) == 2 * 3 * 4
    assert all(cell.resumed[0] != cell.ranks and cell.resumed[1] != cell.strategy for cell in killed)
    for flag in ("--ranks=2", "--strategies=zero3"):
        killed = cells(flag, "--interruptions=killed")
        assert all(cell.resumed != (cell.ranks, cell.strategy) for cell in killed), "there is another place"
    # A setting that only some strategies support needs only those.
    of_two = cells("--reduce_dtype=bf16", "--strategies", "zero3", "zero2")
    assert {cell.strategy for cell in of_two} == {"zero2", "zero3"}


@pytest.mark.parametrize(
    ("gpus", "flags", "is_set"),
    [(4, [], True), (4, ["--use_cpu"], False), (0, [], False), (0, ["--deterministic"], True)],
)
def test_on_gpus_only_deterministic_algorithms_are_used(monkeypatch, gpus, flags, is_set):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(sys, "argv", ["same_bits", "--max_steps=28", *flags])
    settings = parse()[1]
    assert settings.deterministic is is_set
    assert (settings.max_steps, settings.dropout) == (28, 0.1), "what no flag changes stays"


@pytest.mark.parametrize("differs", [False, True])
def test_a_single_cell_that_differs_fails_the_program(review_csv, monkeypatch, capsys, tmp_path, differs):
    def train_cell(cell, settings, folder, rng):
        odd = differs and (cell.path_name, cell.ranks, settings.strategy) == ("trainer_run", 2, "zero3")
        write_run(folder / cell.folder_name, review_csv(), path=cell.path_name, rng_seed=int(odd))

    monkeypatch.setattr(same_bits, "train_cell", train_cell)
    flags = ["--ranks", "1", "2", "--interruptions=uninterrupted", f"--output_dir={tmp_path / 'table'}"]
    monkeypatch.setattr(sys, "argv", ["same_bits", *flags])
    assert run_program(main) == int(differs)
    out = capsys.readouterr().out
    conclusion = "2 different hashes in 16 cells: not" if differs else "all 16 cells have one hash:"
    assert f"\n{conclusion} bitwise identical\n" in out
    command = out.partition("where they differ: ")[2]
    assert ("ddp_loop-1-ddp " in command and "trainer_run-2-zero3 --assert_equal" in command) == differs
