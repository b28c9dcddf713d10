"""The command line of the experiment, and which cells it trains."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from helpers.run_folders import write_run

from app.common.errors import UserError
from app.experiments import same_bits
from app.experiments.same_bits import Cell, as_markdown, build_cells, main, parse
from app.program import run_program


def cells(monkeypatch, *flags: str) -> list:
    monkeypatch.setattr(sys, "argv", ["same_bits", "--use_cpu", *flags])
    options, _ = parse()
    return build_cells(options, random.Random(0))


def test_by_default_every_combination_is_trained(monkeypatch):
    all_cells = cells(monkeypatch)
    assert len({str(cell) for cell in all_cells}) == 2 * 3 * 4 * 2
    killed = [cell for cell in all_cells if cell.resumed is not None]
    assert len(killed) == 2 * 3 * 4
    assert all(cell.resumed[0] != cell.ranks and cell.resumed[1] != cell.strategy for cell in killed)


@pytest.mark.parametrize("flags", [["--ranks=2"], ["--strategies=zero3"]])
def test_a_killed_run_is_resumed_elsewhere_if_there_is_another_place(monkeypatch, flags):
    for cell in cells(monkeypatch, *flags, "--interruptions=killed"):
        assert cell.resumed != (cell.ranks, cell.strategy)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dry_run"], "unknown argument --dry_run"),
        (["--strategy=zero1"], "unknown argument --strategy=zero1: did you mean --strategies?"),
        (["--ddp_comm_hook=bf16"], "--ddp_comm_hook bf16 needs --strategy ddp or zero1, not zero2"),
        (["--reduce_dtype=bf16"], "--reduce_dtype bf16 needs --strategy zero2 or zero3, not ddp"),
        (["--ranks", "0"], "argument --ranks: 0: must be a whole number, 1 or more"),
        (["--strategies=x"], "argument --strategies: invalid choice: 'x'"),
    ],
)
def test_settings_with_which_a_cell_would_fail_are_rejected(monkeypatch, flags, message):
    with pytest.raises(UserError, match=f"^{message}"):
        cells(monkeypatch, *flags)


def test_settings_of_some_strategies_need_only_those(monkeypatch):
    all_cells = cells(monkeypatch, "--reduce_dtype=bf16", "--strategies", "zero3", "zero2")
    assert {cell.strategy for cell in all_cells} == {"zero2", "zero3"}


def test_flags_shorten_the_runs_of_every_cell(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["same_bits", "--train_batch_size=48", "--max_steps=28", "--eval_steps=3"])
    _, settings = parse()
    assert (settings.max_steps, settings.train_batch_size, settings.eval_steps) == (28, 48, 3)
    assert settings.dropout == 0.1, "what no flag changes stays"


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """A function that runs the program in this process; returns its exit status, its output and its error lines."""

    def run(*flags: str) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "argv", ["same_bits", *flags, f"--output_dir={tmp_path / 'table'}"])
        status = run_program(main)
        out, err = capsys.readouterr()
        return status, out, err.splitlines()

    return run


@pytest.mark.parametrize("differs", [False, True])
def test_a_single_cell_that_differs_fails_the_program(review_csv, monkeypatch, call, differs):
    def train_cell(cell, settings, folder, rng):
        odd = differs and (cell.path_name, cell.ranks, settings.strategy) == ("trainer_run", 2, "zero3")
        write_run(folder / cell.folder_name, review_csv(), path=cell.path_name, rng_seed=int(odd))

    monkeypatch.setattr(same_bits, "train_cell", train_cell)
    status, out, _ = call("--ranks", "1", "2", "--interruptions=uninterrupted")
    assert status == int(differs)
    conclusion = "2 different hashes in 16 cells: not" if differs else "all 16 cells have one hash:"
    assert f"\n{conclusion} bitwise identical\n" in out
    (command,) = [line for line in out.splitlines() if line.startswith("where they differ: ")] if differs else [""]
    assert ("ddp_loop-1-ddp " in command and "trainer_run-2-zero3 --assert_equal" in command) == differs


@pytest.mark.parametrize(
    ("gpus", "flags", "is_set"),
    [(4, [], True), (4, ["--use_cpu"], False), (0, [], False), (0, ["--deterministic"], True)],
)
def test_on_gpus_only_deterministic_algorithms_are_used(monkeypatch, gpus, flags, is_set):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(sys, "argv", ["same_bits", *flags])
    assert parse()[1].deterministic is is_set


@pytest.mark.parametrize(
    ("hashes", "conclusion"),
    [
        ("aaa", "all 3 cells have one hash: bitwise identical"),
        ("aba", "2 different hashes in 3 cells: not bitwise identical"),
    ],
)
def test_the_last_line_of_the_table_is_the_conclusion(hashes, conclusion):
    cells = {Cell("ddp_loop", ranks, "ddp"): hash_ * 64 for ranks, hash_ in enumerate(hashes)}
    assert as_markdown(cells).splitlines()[-1] == conclusion
