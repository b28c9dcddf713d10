"""The memory plan: what it accepts, and that its tables add up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from app import plan as module
from app.errors import UserError
from app.model.activations import Activations
from app.plan import RANKS, largest_that_fits, parse_size


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 * 2**30), ("80GB", 80 * 10**9), ("1.5 MiB", 3 * 2**19), ("7 KB", 7_000)]
)
def test_a_size_has_a_number_and_a_unit(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "24", "GiB", "-1GiB", "0GiB", "1e3GiB", "24gib", "24GiB!", "9" * 30 + "GiB", "1.GiB"]
)
def test_any_other_text_is_one_line(text):
    with pytest.raises(UserError, match=r"^--device_memory .*: must be a number with a unit, such as 24GiB or 80GB$"):
        parse_size(text)


@pytest.mark.parametrize(("free", "rows"), [(0, 0), (14, 0), (15, 1), (24, 1), (25, 2), (1_000, 99), (1_005, 100)])
def test_the_largest_micro_batch_fits_and_a_larger_one_does_not(free, rows):
    assert largest_that_fits(free, lambda n: Activations(saved=0, peak=10 * n + 5)) == rows


def run(monkeypatch, tmp_path, review_csv, *flags: str) -> int:
    monkeypatch.chdir(tmp_path)
    fixed = ["--csv", str(review_csv(90)), "--use_cpu", "--max_length=16", "--train_batch_size=8", "--ranks=2"]
    monkeypatch.setattr(sys, "argv", ["plan", *fixed, *flags])
    return module.main()


def table(text: str, title: str) -> list[list[str]]:
    """The cells of the table below a title, without its header."""
    lines = text[text.index(f"## {title}") :].split("\n\n")[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_plan_is_printed_and_written(monkeypatch, tmp_path, review_csv, capsys):
    assert run(monkeypatch, tmp_path, review_csv, "--output_dir=plan", "--device_memory=16MiB") == 0
    text = Path("plan/memory.md").read_text()
    assert text in capsys.readouterr().out
    assert Path("plan/memory.png").read_bytes().startswith(b"\x89PNG")
    assert "2 rank(s), 4 rows x 16 tokens per micro-batch, fp32" in text
    parts = {row[0]: [float(cell.replace(",", "")) for cell in row[1:]] for row in table(text, "The rank that needs")}
    assert list(parts) == ["ddp", "zero1", "zero2", "zero3"]
    for *numbers, total in parts.values():
        assert sum(numbers) == pytest.approx(total, abs=0.5), "rounded numbers"
    by_ranks = table(text, "By the number of ranks")
    assert [row[0] for row in by_ranks] == [str(n) for n in RANKS]
    assert [float(cell) for cell in by_ranks[1][1:]] == [row[-1] for row in parts.values()]
    fits = [int(row[2]) for row in table(text, "What fits into 16 MiB")]
    assert min(fits) > 4, "more than the micro-batch of the plan"


def test_offloaded_state_is_not_on_the_device(monkeypatch, tmp_path, review_csv, capsys):
    assert run(monkeypatch, tmp_path, review_csv, "--strategy=zero3") == 0
    kept = table(capsys.readouterr().out, "By the number of ranks")
    assert run(monkeypatch, tmp_path, review_csv, "--strategy=zero3", "--cpu_offload") == 0
    offloaded = table(capsys.readouterr().out, "By the number of ranks")
    assert [row[:4] for row in kept] == [row[:4] for row in offloaded]
    assert float(offloaded[1][4]) < float(kept[1][4])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks=0"], "error: --ranks 0: must be 1 or more"),
        (["--ranks=3"], "error: --train_batch_size 8 can't be divided among 3 rank(s)"),
        (["--deepspeed=ds.json"], "error: --deepspeed: only app.trainer_run has it: "),
        (["--fsdp"], "error: --fsdp: only app.trainer_run has it: "),
        (["--device_memory=24"], "error: --device_memory 24: must be a number with a unit"),
        (["--model=missing"], "error: "),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_folder(monkeypatch, tmp_path, review_csv, capsys, flags, message):
    assert run(monkeypatch, tmp_path, review_csv, *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)
    assert not (tmp_path / "runs").exists()
