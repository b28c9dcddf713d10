"""Steps are reduced over the ranks, one that is not finite is reported, and the log is complete on a full disk."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record.run_records import files_up_to

from app.common.errors import RunError
from app.record import steps as steps_module
from app.record.run_record import RunRecord
from app.record.steps import MAX_SKIPPED, MetricsLog, Step, StepLog, console_line, count_tokens, mean
from app.runs.schema import STEPS


def step(number: int, losses: Sequence[float], grad_norm: float) -> Step:
    line = {"step": number, "epoch": 0.5, "loss": None, "grad_norm": None, "learning_rate": 1e-3}
    line |= {"examples": 4, "tokens": 10, "padded_tokens": 12, "seconds": 0.25}
    return Step(line, torch.tensor(losses), torch.tensor(grad_norm))


@given(losses=st.lists(st.floats(2**-20, 2**20), min_size=1), rng=st.randoms(use_true_random=False))
def test_a_mean_loss_does_not_depend_on_the_order_of_the_micro_batches(losses, rng):
    """Their order differs with the ranks; tests/launched/test_laws.py compares all values of the steps."""
    expected = math.fsum(losses) / len(losses)  # a sum that is rounded after each addition would depend on the order
    rng.shuffle(losses)
    assert mean(losses) == expected


@pytest.mark.parametrize("losses", [[1.0, math.inf], [-math.inf, 1.0], [math.inf, -math.inf], [math.inf, math.nan]])
def test_a_loss_that_is_not_finite_is_not_hidden(losses):
    assert str(mean(losses)) == str(sum(losses) / len(losses))


def test_padding_does_not_count_as_tokens_if_there_is_a_mask():
    ids, mask = torch.ones(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 0], [1, 0, 0]])
    counts = count_tokens([{"input_ids": ids, "attention_mask": mask}, {"input_ids": ids}])
    assert counts == {"examples": 4, "tokens": 9, "padded_tokens": 12}


def test_the_speed_in_a_console_line_is_that_of_all_its_steps():
    lines = [step(number, [], 1.0).line | {"loss": 0.5, "grad_norm": 1.0} for number in (1, 2)]
    assert console_line([lines[0] | {"seconds": 0.75}, lines[1]], 9).endswith(", 8 reviews/s")


# ---- steps that are not finite ---------------------------------------------------------------------------------------


def write(record: RunRecord, *steps: tuple[float, float]) -> None:
    """Write the next steps, with these losses and gradient norms."""
    first = record.steps.last_step + 1
    record.steps.pending = [step(number, [loss], norm) for number, (loss, norm) in enumerate(steps, start=first)]
    record.steps.last_step += len(steps)
    record.write_steps()


def norms_on_disk(record: RunRecord) -> list[float | None]:
    return [json.loads(line)["grad_norm"] for line in (record.folder / STEPS.name).read_text().splitlines()]


@pytest.mark.parametrize(
    ("precision", "steps", "message"),
    [
        ("fp32", [(0.5, math.nan), (0.5, 1.0)], "^step 2: the gradient norm is nan; the optimizer skipped this step$"),
        ("fp32", [(math.inf, 1.0)], r"^step 2: the loss is not finite on rank 0, rows [\d, ]+$"),
        ("fp16", [(math.nan, math.nan)], "^step 2: the loss is not finite on rank 0"),  # no overflow of gradients
    ],
)
def test_a_step_that_is_not_finite_is_reported_and_the_steps_before_it_are_written(started, precision, steps, message):
    record = started(precision=precision)
    with pytest.raises(RunError, match=message):
        write(record, (0.5, 1.25), *steps)
    assert norms_on_disk(record) == [1.25]
    assert record.steps.last_step == 1


def test_a_step_that_overflowed_in_fp16_is_counted_and_training_continues(started, capsys):
    record = started(precision="fp16", logging_steps=2)
    for norm in (math.inf, 1.5, math.nan, math.inf):
        write(record, (0.5, norm))
    assert norms_on_disk(record) == [None, 1.5, None, None]
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert ["overflow (step skipped)" in line for line in printed] == [False, True]
    lines = (record.folder / STEPS.name).read_text().splitlines()
    assert StepLog(record.run, lines).skipped_in_a_row == record.steps.skipped_in_a_row == 2, "a resumed run counts on"


@pytest.mark.parametrize("at_once", [1, 100])
def test_too_many_overflows_in_a_row_have_another_cause(started, at_once):
    record = started(precision="fp16")
    write(record, *[(0.5, math.inf)] * 10, (0.5, 1.0))  # the last one ends the row
    overflows = [(0.5, math.inf)] * (MAX_SKIPPED + 1)
    *intervals, last = (overflows[start : start + at_once] for start in range(0, len(overflows), at_once))
    for steps in intervals:
        write(record, *steps)
    with pytest.raises(RunError, match=f"step {12 + MAX_SKIPPED}: .* overflowed in fp16 in {MAX_SKIPPED + 1} steps"):
        write(record, *last)
    assert norms_on_disk(record) == [*[None] * 10, 1.0, *[None] * MAX_SKIPPED]


@pytest.mark.parametrize(
    ("losses", "hook", "message"),
    [
        ([0.5, math.nan], "no", "the loss is not finite on rank 1, rows 7, 9; the"),
        ([1.0, 0.5], "fp16", "the gradient norm is inf (--ddp_comm_hook fp16 rounds a gradient above 65504 to inf"),
        ([1.0, 0.5], "bf16", "the gradient norm is inf; the"),
    ],
)
def test_the_error_names_ranks_rows_and_a_hook_that_overflows(started, monkeypatch, losses, hook, message):
    monkeypatch.setattr(steps_module, "all_gather_object", lambda mine, world: [(True, "1, 2"), mine])
    error = started(ddp_comm_hook=hook).steps.nonfinite_error(step(4, losses, math.inf))
    assert str(error).startswith(f"step 4: {message}")


# ---- the log ---------------------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.text("abé好", max_size=9).map(lambda text: text + "\n"), max_size=12),
    rooms=st.lists(st.integers(0, 30), min_size=12, max_size=12),
    n_kept=st.integers(0, 3),
    stale=st.booleans(),
)
def test_no_line_is_missing_or_repeated_once_there_is_room_on_a_full_disk(tmp_path, lines, rooms, n_kept, stale):
    kept, lines = lines[:n_kept], lines[n_kept:]
    path, before = tmp_path / "steps.jsonl", "".join(kept) + "stale\n" * stale
    path.write_text(before)
    log = MetricsLog(path, kept)
    assert path.read_text() == before, "a log is cut when the first new line is appended, not before"
    for number, (line, room) in enumerate(zip(lines, rooms, strict=False), start=1):
        with files_up_to(path.stat().st_size + room), suppress(OSError):
            log.append([line])
        assert "".join(kept + lines[:number]).encode().startswith(path.read_bytes())
    log.flush()
    assert path.read_text() == "".join(kept + lines)


def test_a_log_without_lines_or_without_its_folder_is_not_created(tmp_path):
    MetricsLog(tmp_path / "evaluations.jsonl").flush()
    with pytest.raises(FileNotFoundError):
        MetricsLog(tmp_path / "gone" / "steps.jsonl").append(["1\n"])
    assert not list(tmp_path.iterdir())
