"""Trackers: what their libraries get, and that one that fails is a warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from accelerate import tracking
from helpers.run_records import add_steps, begin

from app.common.errors import UserError
from app.settings import Settings
from app.training.prepare import resolve_settings

FLAGS = {"report_to": "wandb,trackio", "save_strategy": "no", "run_name": "first", "project": "reviews"}
EVALUATION = {"n": 12, "accuracy": 1 / 3, "f1": 0.5, "loss": 0.7}
Started = list[tuple[str, dict[str, Any]]]


class FakeTracker:
    """A tracker of accelerate that keeps what it is given, and fails in the method `fails_in`."""

    fails_in, problem = "", RuntimeError("the service\n is gone")
    started: ClassVar[Started] = []
    logged: ClassVar[list[tuple[int, dict[str, Any]]]] = []

    def __init__(self, project: str, **options: Any) -> None:
        self.started.append((project, options))

    def start(self) -> None:
        self._fail("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        assert values["learning_rate"] == 1e-3
        self._fail("config")

    def log(self, values: dict[str, Any], step: int) -> None:
        self._fail("log")
        self.logged.append((step, values))

    def finish(self) -> None:
        self._fail("finish")

    def _fail(self, method: str) -> None:
        if method == self.fails_in:
            raise self.problem


@pytest.fixture
def fake(monkeypatch) -> Callable[..., type[FakeTracker]]:
    """Replace W&B by a tracker that works, and trackio by one that may fail."""

    def use(**attributes: Any) -> type[FakeTracker]:
        works = type("Works", (FakeTracker,), {"started": [], "logged": []})
        fails = type("Fails", (FakeTracker,), {"started": works.started, "logged": [], **attributes})
        monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", works)
        monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "trackio", fails)
        return works

    return use


def test_trackers_get_steps_and_evaluations_in_full_precision(new_record, fake):
    works = fake()
    record, plan = new_record(**FLAGS, learning_rate=1e-3)
    begin(record, plan)
    add_steps(record, 1, 2)
    record.after_evaluation(2, "test", EVALUATION)
    record.trackers.close()
    (wandb, its_options), (trackio, other_options) = works.started
    assert wandb == trackio == "reviews"
    assert its_options["name"] == "first"
    assert other_options["name"] == f"first-{its_options['id'][:6]}"
    assert [step for step, _ in works.logged] == [1, 2, 2]
    assert works.logged[0][1]["train/loss"] == 0.5
    assert works.logged[2][1] == {f"eval/{name}": value for name, value in EVALUATION.items()} | {
        "eval/epoch": 2 / plan.steps_per_epoch
    }


@pytest.mark.parametrize("method", ["start", "config", "log", "finish"])
@pytest.mark.parametrize("problem", [RuntimeError("the service\n is gone"), SystemExit("the service is gone")])
def test_a_tracker_that_fails_is_one_warning_and_the_others_go_on(new_record, fake, capsys, method, problem):
    works = fake(fails_in=method, problem=problem)
    record, plan = new_record(**FLAGS, learning_rate=1e-3)
    begin(record, plan)
    add_steps(record, 1, 2)
    record.after_evaluation(2, "test", EVALUATION)
    record.trackers.close()
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert warnings == [
        "warning: --report_to trackio: the service is gone; it gets no more values, the run is not affected"
    ]
    assert [step for step, _ in works.logged] == [1, 2, 2]


def test_a_tracker_that_is_not_installed_is_rejected(world, monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()  # as W&B writes it
    monkeypatch.syspath_prepend(tmp_path)
    settings = Settings(report_to="wandb", output_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"^--report_to wandb: its package is not installed: run pip install"):
        resolve_settings("ddp_loop", settings, world)
