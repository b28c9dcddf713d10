"""The command line of the experiment, and which cells it trains."""

from __future__ import annotations

import random
import sys

import pytest
import torch

from app.common.errors import UserError
from app.experiments import parity_table, same_bits
from app.experiments.same_bits import Cell, as_markdown, build_cells, parse


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
        (["--save_steps=30"], "--save_steps 30: must be less than half of --max_steps 60"),
        (["--max_steps=-1"], "--save_steps 10: must be less than half of --max_steps -1"),
        (["--save_strategy=epoch"], "--save_strategy epoch: must be steps"),
        (["--logical_ranks=6", "--ranks", "1", "2", "3"], "--logical_ranks 6: must be a power of two"),
        (["--ranks", "1", "3"], "--ranks 3: must divide --logical_ranks 4"),
        (["--ddp_comm_hook=bf16"], "--ddp_comm_hook bf16 needs --strategy ddp or zero1, not zero2"),
        (["--ddp_comm_hook=power_sgd", "--strategies=ddp"], "--ddp_comm_hook power_sgd .* need 4 ranks, not 1"),
        (["--ranks", "0"], "--ranks 0: must divide --logical_ranks 4"),
    ],
)
def test_settings_with_which_a_cell_would_fail_are_refused(monkeypatch, flags, message):
    with pytest.raises(UserError, match=f"^{message}"):
        cells(monkeypatch, *flags)


@pytest.mark.parametrize(
    ("gpus", "flags", "is_set"),
    [(4, [], True), (4, ["--use_cpu"], False), (0, [], False), (0, ["--deterministic"], True)],
)
def test_on_gpus_only_deterministic_algorithms_are_used(monkeypatch, gpus, flags, is_set):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for module in (same_bits, parity_table):
        monkeypatch.setattr(sys, "argv", [module.__name__, *flags])
        assert module.parse()[1].deterministic is is_set


@pytest.mark.parametrize(
    ("hashes", "conclusion"),
    [
        ("aaa", "all 3 cells have one hash: bitwise identical"),
        ("aba", "2 different hashes in 3 cells: not bitwise identical"),
        ("a", "1 cell: nothing to compare it with"),
    ],
)
def test_the_last_line_of_the_table_is_the_conclusion(hashes, conclusion):
    cells = {Cell("ddp_loop", ranks, "ddp"): hash_ * 64 for ranks, hash_ in enumerate(hashes)}
    assert as_markdown(cells).splitlines()[-1] == conclusion
