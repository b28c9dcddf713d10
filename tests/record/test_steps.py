"""Steps are reduced over the ranks, one that is not finite is reported, and the log is complete on a full disk."""

from __future__ import annotations

import math
import os
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record.conftest import do_steps, files_up_to, on_disk

from app.common.errors import RunError
from app.record import steps as steps_module
from app.record.steps import MAX_SKIPPED, MetricsLog, count_tokens, mean

NUMBERS = st.floats(2**-20, 2**20) | st.sampled_from([math.inf, -math.inf, math.nan])


@given(losses=st.lists(NUMBERS, min_size=1), rng=st.randoms(use_true_random=False))
def test_a_mean_loss_depends_on_no_order_and_hides_no_value_that_is_not_finite(losses, rng):
    """The order differs with the ranks; tests/launched/test_laws.py compares all values of the steps."""
    found, expected = mean(losses), sum(losses) / len(losses)
    rng.shuffle(losses)
    assert str(mean(losses)) == str(found)
    assert found == pytest.approx(expected, nan_ok=True)


def test_padding_does_not_count_as_tokens_if_there_is_a_mask():
    ids, mask = torch.ones(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 0], [1, 0, 0]])
    counts = count_tokens([{"input_ids": ids, "attention_mask": mask}, {"input_ids": ids}])
    assert counts == {"examples": 4, "tokens": 9, "padded_tokens": 12}


@pytest.mark.parametrize(
    ("flags", "loss", "norm", "message"),
    [
        ({}, 0.5, math.nan, "the gradient norm is nan; the optimizer skipped this step"),
        ({}, math.inf, 1.0, r"the loss is not finite on rank 1, rows [\d, ]+"),
        ({"precision": "fp16"}, math.nan, math.nan, "the loss is not finite on rank 1, .*"),  # no overflow of gradients
        ({"ddp_comm_hook": "fp16"}, 0.5, math.inf, r"the gradient norm is inf \(--ddp_comm_hook fp16 rounds .*"),
        ({"ddp_comm_hook": "bf16"}, 0.5, math.inf, "the gradient norm is inf; the optimizer skipped this step"),
    ],
)
def test_a_step_that_is_not_finite_is_reported_and_the_steps_before_it_are_written(
    started, monkeypatch, flags, loss, norm, message
):
    monkeypatch.setattr(steps_module, "all_gather_object", lambda mine, world: [(True, "1, 2"), mine])  # of two ranks
    record = started(**flags, logging_steps=3)
    do_steps(record)
    do_steps(record, loss=loss, grad_norm=norm)
    with pytest.raises(RunError, match=f"^step 2: {message}$"):
        do_steps(record)
    assert on_disk(record) == [1]
    assert record.steps.last_step == 1


def test_a_step_that_overflowed_in_fp16_is_counted_and_training_continues(started, capsys):
    record = started(precision="fp16", logging_steps=2, save_steps=4)
    for norm in (math.inf, 1.5, math.nan, math.inf):
        do_steps(record, grad_norm=norm)
    assert on_disk(record, "grad_norm") == [None, 1.5, None, None]
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert ["overflow (step skipped)" in line for line in printed] == [False, True]
    os.close(record.run.lock)
    resumed = started(precision="fp16", resume_from_checkpoint="auto")
    assert resumed.steps.skipped_in_a_row == record.steps.skipped_in_a_row == 2


@pytest.mark.parametrize("at_once", [1, 12 + MAX_SKIPPED])
def test_too_many_overflows_in_a_row_have_another_cause(started, at_once):
    record = started(precision="fp16", max_steps=50, logging_steps=at_once, save_strategy="no")
    do_steps(record, 10, grad_norm=math.inf)
    do_steps(record)
    do_steps(record, MAX_SKIPPED, grad_norm=math.inf)
    with pytest.raises(RunError, match=f"step {12 + MAX_SKIPPED}: .* overflowed in fp16 in {MAX_SKIPPED + 1} steps"):
        do_steps(record, grad_norm=math.inf)
    assert on_disk(record, "grad_norm") == [*[None] * 10, 1.25, *[None] * MAX_SKIPPED]


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
