"""Steps are reduced over the ranks, and a step that is not finite is reported."""

from __future__ import annotations

import pytest
import torch
from run_records import add_steps, steps_on_disk
from worlds import fake_world

from app.errors import RunError
from app.runs import steps as steps_module
from app.runs.steps import Step, count_tokens, nonfinite_error, reduce_steps


def step(number: int, loss: float, grad_norm: float) -> Step:
    return Step(
        number,
        epoch=0.5,
        loss=torch.tensor(loss),
        grad_norm=torch.tensor(grad_norm),
        learning_rate=1e-3,
        examples=4,
        tokens=torch.tensor(10),
        padded_tokens=12,
        seconds=0.25,
    )


def test_losses_are_averaged_and_counts_are_summed_over_the_ranks(monkeypatch):
    monkeypatch.setattr(steps_module, "reduce_mean", lambda values, world: values / 2)
    monkeypatch.setattr(steps_module, "reduce_sum", lambda values, world: values * 3)
    first, second = reduce_steps([step(1, 0.5, 2.0), step(2, 0.25, float("inf"))], fake_world())
    assert first == {
        "step": 1,
        "epoch": 0.5,
        "loss": 0.25,
        "grad_norm": 2.0,
        "learning_rate": 1e-3,
        "examples": 12,
        "tokens": 30,
        "padded_tokens": 36,
        "seconds": 0.25,
    }
    assert (second["step"], second["loss"], second["grad_norm"]) == (2, 0.125, float("inf"))


def test_padding_does_not_count_as_tokens_if_there_is_a_mask():
    ids, mask = torch.ones(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert count_tokens([{"input_ids": ids, "attention_mask": mask}, {"input_ids": ids}]) == (4, 9, 12)


def test_a_step_that_is_not_finite_is_reported_and_the_steps_before_it_are_written(new_record):
    record, plan = new_record()
    record.begin(plan)
    add_steps(record, 1)
    record.pending = [step(2, 0.5, 1.0), step(3, 0.5, float("nan")), step(4, 0.5, 1.0)]
    with pytest.raises(RunError, match="step 3: the gradient norm is nan; the optimizer skipped this step"):
        record.write_steps()
    assert steps_on_disk(record) == [1, 2]
    assert record.step == 2
    assert record.totals.examples == 8


def test_the_error_names_ranks_and_rows(monkeypatch):
    reports = [(True, "1, 2"), (False, "7, 9")]
    monkeypatch.setattr(steps_module, "all_gather_object", lambda mine, world: [reports[0], mine])
    error = nonfinite_error(step(4, float("nan"), float("nan")), [7, 9], fake_world())
    assert str(error) == "step 4: the loss is not finite on rank 1, rows 7, 9; the optimizer skipped this step"
    error = nonfinite_error(step(4, 1.0, float("inf")), [7, 9], fake_world())
    assert str(error) == "step 4: the gradient norm is inf; the optimizer skipped this step"
