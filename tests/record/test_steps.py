"""Steps are reduced over the ranks, one that is not finite is reported, and the log is complete on a full disk."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import permutations
from typing import Any

import pytest
import torch
from helpers.run_records import add_steps, begin, steps_on_disk
from helpers.worlds import fake_world
from hypothesis import given
from hypothesis import strategies as st

from app.common.errors import RunError
from app.distributed.world import World
from app.record import steps as steps_module
from app.record.run_record import RunRecord
from app.record.steps import MAX_SKIPPED, MetricsLog, Step, StepLog, count_tokens, mean, reduce_steps
from app.runs.schema import STEPS


def step(number: int, losses: Sequence[float], grad_norm: float) -> Step:
    line = {"step": number, "epoch": 0.5, "loss": None, "grad_norm": None, "learning_rate": 1e-3}
    line |= {"examples": 4, "tokens": 10, "padded_tokens": 12, "seconds": 0.25}
    return Step(line, torch.tensor(losses), torch.tensor(grad_norm))


def reduce_over(ranks: Sequence[Sequence[Step]], monkeypatch) -> list[dict[str, Any]]:
    """Reduce the steps of several ranks, as each of them would."""

    sent: list[Any] = []

    def gather(value: Any, world: World) -> list[Any]:
        sent.append(value)
        return [*sent, *[value] * (len(ranks) - len(sent))]

    monkeypatch.setattr(steps_module, "all_gather_object", gather)
    # Each call knows what the ranks before it have sent.
    return [reduce_steps(steps, fake_world(rank, len(ranks))) for rank, steps in enumerate(ranks)][-1]


def test_losses_are_averaged_and_counts_are_summed_over_the_ranks(monkeypatch):
    mine = [step(1, [0.5, 0.25], 2.0), step(2, [0.25, 0.75], float("inf"))]
    theirs = [step(1, [0.125, 0.125], 2.0), step(2, [1.0, 2.0], float("inf"))]
    first, second = reduce_over([mine, theirs], monkeypatch)
    assert first == {
        "step": 1,
        "epoch": 0.5,
        "loss": 0.25,
        "grad_norm": 2.0,
        "learning_rate": 1e-3,
        "examples": 8,
        "tokens": 20,
        "padded_tokens": 24,
        "seconds": 0.25,
    }
    assert (second["step"], second["loss"], second["grad_norm"]) == (2, 1.0, float("inf"))


@given(
    losses=st.lists(st.floats(2**-20, 2**20, width=32), min_size=8, max_size=8),
    ranks=st.sampled_from([1, 2, 4, 8]),
    order=st.permutations(range(8)),
)
def test_the_loss_does_not_depend_on_how_the_micro_batches_are_divided_among_the_ranks(losses, ranks, order):
    """Each loss is one of a logical rank; a sharded strategy gives the ranks other ones."""
    share = 8 // ranks
    in_order = [losses[i] for i in order]
    by_rank = [[step(1, in_order[rank * share : (rank + 1) * share], 1.0)] for rank in range(ranks)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        (line,) = reduce_over(by_rank, monkeypatch)
    assert line["loss"] == math.fsum(losses) / 8


def test_a_rounded_sum_of_losses_would_depend_on_their_order():
    """Otherwise the test above could not fail."""
    losses = [1e6, 1e-6, 0.1, 0.7] * 2
    assert len({sum(order) for order in permutations(losses[:4])}) > 1
    assert len({mean(order) for order in permutations(losses[:4])}) == 1


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


def test_a_step_that_is_not_finite_is_reported_and_the_steps_before_it_are_written(new_record):
    record, plan = new_record()
    begin(record, plan)
    add_steps(record, 1)
    record.steps.pending = [step(2, [0.5], 1.0), step(3, [0.5], float("nan")), step(4, [0.5], 1.0)]
    with pytest.raises(RunError, match="step 3: the gradient norm is nan; the optimizer skipped this step"):
        record.write_steps()
    assert steps_on_disk(record) == [1, 2]
    assert record.steps.last_step == 2


def norms_on_disk(record: RunRecord) -> list[float | None]:
    return [json.loads(line)["grad_norm"] for line in (record.folder / STEPS.name).read_text().splitlines()]


def test_a_step_that_overflowed_in_fp16_is_counted_and_training_continues(new_record, capsys):
    record, plan = new_record(precision="fp16", logging_steps=2)
    begin(record, plan)
    for number, norm in enumerate([math.inf, 1.5, math.nan, math.inf], start=1):
        record.steps.pending.append(step(number, [0.5], norm))
        record.steps.last_step = number
        record.write_steps()
    assert norms_on_disk(record) == [None, 1.5, None, None]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert ["overflow (step skipped)" in line for line in lines] == [False, True]
    lines = (record.folder / STEPS.name).read_text().splitlines()
    assert StepLog(record.run, lines).skipped_in_a_row == record.steps.skipped_in_a_row == 2, "a resumed run counts on"


@pytest.mark.parametrize("in_one_interval", [False, True])
def test_too_many_overflows_in_a_row_have_another_cause(new_record, in_one_interval):
    record, plan = new_record(precision="fp16")
    begin(record, plan)
    record.steps.pending = [step(n, [0.5], math.inf) for n in range(1, 11)] + [step(11, [0.5], 1.0)]
    record.write_steps()
    overflows = [step(n, [0.5], math.inf) for n in range(12, 13 + MAX_SKIPPED)]
    *intervals, last = [overflows] if in_one_interval else [[one] for one in overflows]
    for interval in intervals:
        record.steps.pending = interval
        record.write_steps()
    record.steps.pending = last
    with pytest.raises(RunError, match=f"step {12 + MAX_SKIPPED}: .* overflowed in fp16 in {MAX_SKIPPED + 1} steps"):
        record.write_steps()
    assert steps_on_disk(record) == list(range(1, 12 + MAX_SKIPPED))
    assert norms_on_disk(record).count(None) == 10 + MAX_SKIPPED


def test_a_loss_that_is_not_finite_is_no_overflow_of_gradients(new_record):
    record, plan = new_record(precision="fp16")
    begin(record, plan)
    record.steps.pending = [step(1, [0.5], math.inf), step(2, [math.nan], math.nan)]
    with pytest.raises(RunError, match="step 2: the loss is not finite on rank 0"):
        record.write_steps()
    assert steps_on_disk(record) == [1]


def test_a_loss_that_is_not_finite_fails_the_run_even_if_the_gradient_norm_is(new_record):
    record, plan = new_record()
    begin(record, plan)
    record.steps.pending = [step(1, [0.5], 1.0), step(2, [math.inf], 1.0)]
    with pytest.raises(RunError, match=r"^step 2: the loss is not finite on rank 0, rows [\d, ]+$"):
        record.write_steps()
    assert steps_on_disk(record) == [1]


@pytest.mark.parametrize(
    ("losses", "grad_norm", "hook", "skipped", "message"),
    [
        ([0.5, math.nan], math.nan, "no", 3, "the loss is not finite on rank 1, rows 7, 9"),
        ([1.0, 0.5], math.inf, "no", 0, "the gradient norm is inf"),
        (
            *([1.0, 0.5], math.inf, "fp16", 0),
            "the gradient norm is inf (--ddp_comm_hook fp16 rounds a gradient above 65504 to infinity; bf16 does not)",
        ),
        ([1.0, 0.5], math.inf, "bf16", 0, "the gradient norm is inf"),
    ],
)
def test_the_error_names_ranks_and_rows(new_record, monkeypatch, losses, grad_norm, hook, skipped, message):
    monkeypatch.setattr(steps_module, "all_gather_object", lambda mine, world: [(True, "1, 2"), mine])
    record, _ = new_record(precision="fp16", ddp_comm_hook=hook)
    log = StepLog(record.run, ['{"grad_norm": null}\n'] * skipped)
    error = log.nonfinite_error(step(4, losses, grad_norm))
    assert str(error) == f"step 4: {message}; the optimizer skipped this step"


# ---- the log ---------------------------------------------------------------------------------------------------------


class Disk:
    """A disk with `room` bytes left. It takes the place of the file that a log opens."""

    def __init__(self, room: int, content: bytes = b"") -> None:
        self.room, self.content = room, content
        self.fails_at_close = False

    def open(self, mode: str) -> Disk:
        assert mode == "ab"
        return self

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, problem: object, *_: object) -> None:
        if self.fails_at_close and problem is None:  # as NFS does when a quota is exceeded
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    def write(self, content: bytes) -> None:
        accepted = content[: self.room]
        self.room -= len(accepted)
        self.content += accepted
        if accepted != content:
            raise OSError(errno.ENOSPC, "No space left on device")

    def truncate(self, size: int) -> None:
        self.room += len(self.content) - size
        self.content = self.content[:size]


@given(
    lines=st.lists(st.text("abé好", max_size=9).map(lambda text: text + "\n"), max_size=12),
    rooms=st.lists(st.integers(0, 30), min_size=12, max_size=12),
    n_kept=st.integers(0, 3),
    stale=st.booleans(),
)
def test_no_line_is_missing_or_repeated_once_there_is_room_on_a_full_disk(lines, rooms, n_kept, stale):
    kept, lines = lines[:n_kept], lines[n_kept:]
    disk = Disk(0, ("".join(kept) + "stale\n" * stale).encode())
    log = MetricsLog(disk, kept)
    for number, (line, room) in enumerate(zip(lines, rooms, strict=False), start=1):
        disk.room += room
        with suppress(OSError):
            log.append([line])
        assert "".join(kept + lines[:number]).encode().startswith(disk.content)
    disk.room += 10_000
    log.append([])
    assert disk.content == "".join(kept + lines).encode()


def test_no_line_is_repeated_if_a_failure_is_reported_only_when_the_file_is_closed():
    disk = Disk(100)
    log = MetricsLog(disk)
    log.append(["1\n"])
    disk.fails_at_close = True
    with pytest.raises(OSError, match="quota"):
        log.append(["2\n"])
    disk.fails_at_close = False
    log.append(["3\n"])
    assert disk.content == b"1\n2\n3\n"


@pytest.mark.parametrize("before", ["1\n2\nstale\n", "1\n2\n"])
def test_a_log_is_cut_after_the_kept_lines_when_the_first_one_is_appended(tmp_path, before):
    path = tmp_path / "steps.jsonl"
    path.write_text(before)
    log = MetricsLog(path, ["1\n", "2\n"])
    assert path.read_text() == before
    log.append(["3\n"])
    assert path.read_text() == "1\n2\n3\n"
    log.flush()
    assert path.read_text() == "1\n2\n3\n"


def test_a_log_without_lines_is_not_created(tmp_path):
    MetricsLog(tmp_path / "evaluations.jsonl").flush()
    assert not list(tmp_path.iterdir())
    log = MetricsLog(tmp_path / "gone" / "steps.jsonl")
    with pytest.raises(FileNotFoundError):
        log.append(["1\n"])
    assert log.pending == b"1\n"
    assert not (tmp_path / "gone").exists()
