"""Early stopping, compared with transformers' own."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

from app.metrics.early_stopping import EarlyStopping
from app.settings import Settings

ARGUMENTS = {"use_cpu": True, "load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}


def stopping_evaluation_of_transformers(values, metric, patience, threshold):
    """Return the number of evaluations until transformers' callback stops, updating the best metric as Trainer does."""
    greater = metric != "loss"
    arguments = TrainingArguments(metric_for_best_model=metric, greater_is_better=greater, **ARGUMENTS)
    callback, state, control = EarlyStoppingCallback(patience, threshold), TrainerState(), TrainerControl()
    for number, value in enumerate(values, start=1):
        callback.on_evaluate(arguments, state, control, metrics={f"eval_{metric}": value})
        if control.should_training_stop:
            return number
        if state.best_metric is None or (value > state.best_metric if greater else value < state.best_metric):
            state.best_metric = value
    return len(values) + 1


@given(
    values=st.lists(st.integers(0, 20).map(lambda n: n / 20), max_size=12),
    metric=st.sampled_from(["accuracy", "f1", "loss"]),
    patience=st.integers(1, 4),
    threshold=st.sampled_from([0.0, 0.05, 0.2]),
)
@example(values=[0.5, 0.4, 0.9, 0.9], metric="accuracy", patience=1, threshold=0.0)
def test_it_stops_when_transformers_does_and_stays_stopped(values, metric, patience, threshold):
    settings = Settings(
        validation_size=0.1,
        metric_for_best_model=metric,
        early_stopping_patience=patience,
        early_stopping_threshold=threshold,
    )
    last = stopping_evaluation_of_transformers(values, metric, patience, threshold)
    stopping, stops = EarlyStopping(settings), []
    for value in values:
        stopping.add({metric: value})
        stops.append(stopping.stops)
    assert stops == [number >= last for number in range(1, len(values) + 1)]
