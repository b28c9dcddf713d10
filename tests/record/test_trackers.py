"""Trackers: what their libraries get, and that one that fails is a warning."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from accelerate import tracking
from record.run_records import add_steps

from app.common.errors import UserError
from app.settings import Settings
from app.training.prepare import resolve_settings

EVALUATION = {"n": 12, "accuracy": 1 / 3, "f1": 0.5, "loss": 0.7}


@pytest.fixture
def fakes(monkeypatch) -> dict[str, Mock]:
    """The classes of accelerate's trackers, which only keep what they are given."""
    fakes = {name: Mock(spec=tracking.LOGGER_TYPE_TO_CLASS[name]) for name in ("wandb", "trackio")}
    for name, fake in fakes.items():
        monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, fake)
    return fakes


@pytest.fixture
def train(started):
    """Two steps and an evaluation of a run with both trackers."""

    def train() -> None:
        flags = {"report_to": "wandb,trackio", "run_name": "first", "project": "reviews", "max_steps": 10}
        record = started(**flags, save_strategy="no", learning_rate=1e-3, train_batch_size=4)
        add_steps(record, 1, 2)
        record.after_evaluation(2, "test", EVALUATION)
        record.trackers.close()

    return train


def test_trackers_get_settings_steps_and_evaluations_in_full_precision(train, fakes):
    train()
    wandb, trackio = (fake.call_args for fake in fakes.values())
    assert wandb.args == trackio.args == ("reviews",)
    assert (wandb.kwargs["name"], trackio.kwargs["name"]) == ("first", f"first-{wandb.kwargs['id'][:6]}")
    for fake in fakes.values():
        tracker = fake.return_value
        assert tracker.store_init_configuration.call_args.args[0]["learning_rate"] == 1e-3
        first, second, evaluation = tracker.log.call_args_list
        assert [call.kwargs["step"] for call in (first, second, evaluation)] == [1, 2, 2]
        assert (first.args[0]["train/loss"], first.args[0]["train/learning_rate"]) == (0.5, 1e-3)
        assert EVALUATION.items() <= {name.removeprefix("eval/"): v for name, v in evaluation.args[0].items()}.items()


@pytest.mark.parametrize("method", ["start", "store_init_configuration", "log", "finish"])
@pytest.mark.parametrize("problem", [RuntimeError("the service\n is gone"), SystemExit("the service is gone")])
@pytest.mark.parametrize(("fails", "works"), [("wandb", "trackio"), ("trackio", "wandb")])
def test_a_tracker_that_fails_is_one_warning_and_the_others_go_on(train, fakes, capsys, method, problem, fails, works):
    getattr(fakes[fails].return_value, method).side_effect = problem
    train()
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    expected = f"warning: --report_to {fails}: the service is gone; it gets no more values, the run is not affected"
    assert warnings == [expected]
    assert getattr(fakes[fails].return_value, method).call_count == 1
    assert fakes[works].return_value.log.call_count == 3
    fakes[works].return_value.finish.assert_called_once_with()


def test_a_tracker_that_is_not_installed_is_rejected(world, monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()  # as W&B writes it
    monkeypatch.syspath_prepend(tmp_path)
    settings = Settings(report_to="wandb", output_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"^--report_to wandb: its package is not installed: run pip install"):
        resolve_settings("ddp_loop", settings, world)
