"""Steps are reduced over the ranks, one that is not finite is reported, and the log is complete on a full disk."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.worlds import fake_world
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.common.errors import RunError
from app.record import steps as steps_module
from app.record.run_record import RunRecord
from app.record.steps import MAX_SKIPPED, MetricsLog, Step, StepLog, count_tokens, mean, reduce_steps
from app.runs.schema import STEPS


def step(number: int, losses: Sequence[float], grad_norm: float) -> Step:
    line = {"step": number, "epoch": 0.5, "loss": None, "grad_norm": None, "learning_rate": 1e-3}
    line |= {"examples": 4, "tokens": 10, "padded_tokens": 12, "seconds": 0.25}
    return Step(line, torch.tensor(losses), torch.tensor(grad_norm))


def reduce_over(ranks: Sequence[Sequence[Step]]) -> list[dict[str, Any]]:
    """Reduce the steps of several ranks, as each of them would."""
    parts: list[torch.Tensor] = []

    def gather(by_rank: list[torch.Tensor], part: torch.Tensor, group: None) -> None:
        parts.append(part)  # the last rank knows those of all
        for tensor, of_rank in zip(by_rank, parts, strict=False):
            tensor.copy_(of_rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", gather)
        return [reduce_steps(steps, fake_world(rank, len(ranks))) for rank, steps in enumerate(ranks)][-1]


@given(
    losses=st.lists(st.floats(2**-20, 2**20, width=32), min_size=8, max_size=8),
    ranks=st.sampled_from([1, 2, 4, 8]),
    order=st.permutations(range(8)),
)
def test_the_loss_does_not_depend_on_how_the_micro_batches_are_divided_among_the_ranks(losses, ranks, order):
    """Each loss is one of a logical rank; a sharded strategy gives the ranks other ones."""
    shares = [[losses[i] for i in order[rank * 8 // ranks : (rank + 1) * 8 // ranks]] for rank in range(ranks)]
    first, second = reduce_over([[step(1, share, 2.0), step(2, share, math.inf)] for share in shares])
    assert first == step(1, [], 2.0).line | {
        "loss": math.fsum(losses) / 8,  # a sum that is rounded after each addition would depend on the order
        "grad_norm": 2.0,
        **{"examples": 4 * ranks, "tokens": 10 * ranks, "padded_tokens": 12 * ranks},
    }
    assert second == first | {"step": 2, "grad_norm": math.inf}


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0, math.inf], math.inf),
        ([-math.inf, 1.0], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([1.0, math.nan], math.nan),
        ([math.inf, math.nan], math.nan),
    ],
)
def test_a_loss_that_is_not_finite_is_not_hidden(losses, expected):
    assert str(mean(losses)) == str(expected)


def test_padding_does_not_count_as_tokens_if_there_is_a_mask():
    ids, mask = torch.ones(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 0], [1, 0, 0]])
    counts = count_tokens([{"input_ids": ids, "attention_mask": mask}, {"input_ids": ids}])
    assert counts == {"examples": 4, "tokens": 9, "padded_tokens": 12}


# ---- steps that are not finite ---------------------------------------------------------------------------------------


def write(record: RunRecord, *steps: tuple[float, float], first: int = 1) -> None:
    """Write steps with these losses and gradient norms."""
    record.steps.pending = [step(number, [loss], norm) for number, (loss, norm) in enumerate(steps, start=first)]
    record.steps.last_step = first + len(steps) - 1
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
    for number, norm in enumerate([math.inf, 1.5, math.nan, math.inf], start=1):
        write(record, (0.5, norm), first=number)
    assert norms_on_disk(record) == [None, 1.5, None, None]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert ["overflow (step skipped)" in line for line in lines] == [False, True]
    lines = (record.folder / STEPS.name).read_text().splitlines()
    assert StepLog(record.run, lines).skipped_in_a_row == record.steps.skipped_in_a_row == 2, "a resumed run counts on"


@pytest.mark.parametrize("at_once", [1, 100])
def test_too_many_overflows_in_a_row_have_another_cause(started, at_once):
    record = started(precision="fp16")
    write(record, *[(0.5, math.inf)] * 10, (0.5, 1.0))  # the last one ends the row
    overflows = [(0.5, math.inf)] * (MAX_SKIPPED + 1)
    *intervals, last = range(0, len(overflows), at_once)
    for start in intervals:
        write(record, *overflows[start : start + at_once], first=12 + start)
    message = f"step {12 + MAX_SKIPPED}: .* overflowed in fp16 in {MAX_SKIPPED + 1} steps"
    with pytest.raises(RunError, match=message):
        write(record, *overflows[last:], first=12 + last)
    assert norms_on_disk(record) == [*[None] * 10, 1.0, *[None] * MAX_SKIPPED]


@pytest.mark.parametrize(
    ("losses", "hook", "message"),
    [
        ([0.5, math.nan], "no", "the loss is not finite on rank 1, rows 7, 9; the"),
        ([1.0, 0.5], "fp16", "the gradient norm is inf (--ddp_comm_hook fp16 rounds a gradient above 65504 to inf"),
        ([1.0, 0.5], "bf16", "the gradient norm is inf; the"),
    ],
)
def test_the_error_names_ranks_rows_and_a_hook_that_overflows(new_record, monkeypatch, losses, hook, message):
    monkeypatch.setattr(steps_module, "all_gather_object", lambda mine, world: [(True, "1, 2"), mine])
    record, _ = new_record(ddp_comm_hook=hook)
    error = StepLog(record.run, []).nonfinite_error(step(4, losses, math.inf))
    assert str(error).startswith(f"step 4: {message}")


# ---- the log ---------------------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.text("abé好", max_size=9).map(lambda text: text + "\n"), max_size=12),
    rooms=st.lists(st.integers(0, 30), min_size=12, max_size=12),
    n_kept=st.integers(0, 3),
    stale=st.booleans(),
)
def test_no_line_is_missing_or_repeated_once_there_is_room_on_a_full_disk(
    tmp_path, files_up_to, lines, rooms, n_kept, stale
):
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
