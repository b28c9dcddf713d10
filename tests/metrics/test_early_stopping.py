"""Early stopping: the same decisions as those of transformers' callback."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

from app.metrics.early_stopping import EarlyStopping
from app.settings import Settings

ARGUMENTS = {"use_cpu": True, "load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}


def settings(metric: str, patience: int | None, threshold: float = 0.0) -> Settings:
    return Settings(
        validation_size=0.1,
        metric_for_best_model=metric,
        early_stopping_patience=patience,
        early_stopping_threshold=threshold,
    )


def stopping_evaluation_of_transformers(values, metric, patience, threshold, folder):
    """Return the number of evaluations until transformers' callback stops, updating the best metric as Trainer does."""
    greater = metric != "loss"
    arguments = TrainingArguments(folder, metric_for_best_model=metric, greater_is_better=greater, **ARGUMENTS)
    callback, state, control = EarlyStoppingCallback(patience, threshold), TrainerState(), TrainerControl()
    for number, value in enumerate(values, start=1):
        callback.on_evaluate(arguments, state, control, metrics={f"eval_{metric}": value})
        if control.should_training_stop:
            return number
        if state.best_metric is None or (value > state.best_metric if greater else value < state.best_metric):
            state.best_metric = value
    return None


@given(
    values=st.lists(st.integers(0, 20).map(lambda n: n / 20), max_size=12),
    metric=st.sampled_from(["accuracy", "f1", "loss"]),
    patience=st.integers(1, 4),
    threshold=st.sampled_from([0.0, 0.05, 0.2]),
    resumed_after=st.integers(0, 12),
)
def test_it_stops_when_transformers_does(tmp_path_factory, values, metric, patience, threshold, resumed_after):
    folder = tmp_path_factory.getbasetemp()
    expected = stopping_evaluation_of_transformers(values, metric, patience, threshold, folder)
    stopping = EarlyStopping(settings(metric, patience, threshold))
    found = None
    for number, value in enumerate(values, start=1):
        if number == resumed_after + 1:  # from the lines of evaluations.jsonl
            stopping = EarlyStopping(settings(metric, patience, threshold))
            stopping.add_all(json.dumps({"step": 1, metric: earlier}) for earlier in values[: number - 1])
        stopping.add({metric: value})
        if stopping.stops:
            found = number
            break
    assert found == expected


def test_without_patience_it_never_stops():
    stopping = EarlyStopping(settings("loss", None))
    for value in range(50):
        stopping.add({"loss": value})
    assert not stopping.stops


@pytest.mark.parametrize("patience", [1, 3])
def test_once_stopped_it_stays_stopped(patience):
    stopping = EarlyStopping(settings("accuracy", patience))
    for value in (0.5, *[0.4] * patience, 0.9):
        stopping.add({"accuracy": value})
    assert stopping.stops
