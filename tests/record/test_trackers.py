"""Trackers: what their libraries get, and that one that fails is a warning."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest
from accelerate import tracking
from record.conftest import SCORES, do_steps

from app.common.errors import UserError
from app.record.run_record import RunRecord

EVALUATION = SCORES | {"accuracy": 1 / 3}


@pytest.fixture
def fakes(monkeypatch, tmp_path) -> dict[str, Mock]:
    """The classes of accelerate's trackers, which only keep what they are given."""
    fakes = {name: Mock(spec=tracking.LOGGER_TYPE_TO_CLASS[name]) for name in ("wandb", "trackio")}
    for name, fake in fakes.items():
        (tmp_path / f"{name}.py").touch()  # neither package needs to be installed
        monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, fake)
    monkeypatch.syspath_prepend(tmp_path)
    return fakes


def train(started: Callable[..., RunRecord]) -> None:
    """Two steps and an evaluation of a run with both trackers."""
    record = started(report_to="wandb,trackio", run_name="first", project="reviews", learning_rate=1e-3)
    do_steps(record, 2)
    record.after_evaluation(2, "test", EVALUATION)
    record.trackers.close()


def test_trackers_get_settings_steps_and_evaluations_in_full_precision(started, fakes):
    train(started)
    wandb, trackio = (fake.call_args for fake in fakes.values())
    assert wandb.args == trackio.args == ("reviews",)
    assert (wandb.kwargs["name"], trackio.kwargs["name"]) == ("first", f"first-{wandb.kwargs['id'][:6]}")
    for tracker in (fake.return_value for fake in fakes.values()):
        assert tracker.store_init_configuration.call_args.args[0]["learning_rate"] == 1e-3
        first, second, evaluation = tracker.log.call_args_list
        assert [call.kwargs["step"] for call in (first, second, evaluation)] == [1, 2, 2]
        assert (first.args[0]["train/loss"], first.args[0]["train/learning_rate"]) == (0.5, 1e-3)
        assert EVALUATION.items() <= {name.removeprefix("eval/"): v for name, v in evaluation.args[0].items()}.items()


@pytest.mark.parametrize("method", ["start", "store_init_configuration", "log", "finish"])
@pytest.mark.parametrize("problem", [RuntimeError, SystemExit])
def test_a_tracker_that_fails_is_one_warning_and_others_go_on(started, fakes, capsys, method, problem):
    fails, works = (fake.return_value for fake in fakes.values())
    getattr(fails, method).side_effect = problem("the service\n is gone")
    train(started)
    (warning,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:"))
    assert warning.startswith("warning: --report_to wandb: the service is gone; ")
    assert getattr(fails, method).call_count == 1
    assert works.log.call_count == 3
    works.finish.assert_called_once_with()


def test_a_tracker_that_is_not_installed_is_rejected(started, monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()  # as W&B writes it
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"^--report_to wandb: its package is not installed: run pip install"):
        started(report_to="wandb")
