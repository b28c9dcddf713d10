"""Trackers that work, raise, hang or are slow: what they get, and that training never waits for them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
from helpers.run_records import Copies, add_steps, begin, correct_predictions
from torch import nn

from app.checkpoint.resume import Resume
from app.common.errors import UserError
from app.record import run_record as record_module
from app.record import tracking
from app.record.run_record import RunRecord
from app.runs.schema import RUN_STATE, STEPS, TRACKERS
from app.settings import Settings

FLAGS = {"report_to": "wandb", "save_strategy": "no"}
EVALUATION = {"n": 12, "accuracy": 1 / 3, "f1": 0.5, "loss": 0.7}


class FakeTracker:
    """A tracker of accelerate that keeps what it is given. It calls `before` with the name of each method first."""

    def __init__(self, before: Callable[[str], None] = lambda name: None) -> None:
        self.before = before
        self.ids: list[str | None] = []  # of the runs that it was started with
        self.config: dict[str, object] = {}
        self.logged: list[tuple[int, dict[str, object]]] = []
        self.has_finished = False

    def store_init_configuration(self, values: dict[str, object]) -> None:
        self.before("config")
        self.config |= values

    def log(self, values: dict[str, object], step: int) -> None:
        self.before("log")
        self.logged.append((step, values))

    def finish(self) -> None:
        self.before("finish")
        self.has_finished = True

    def steps(self, name: str) -> list[int]:
        return [step for step, values in self.logged if name in values]


@pytest.fixture
def track(monkeypatch) -> Callable[..., FakeTracker]:
    """Replace the trackers of all runs by one, which is returned."""

    def use(before: Callable[[str], None] = lambda name: None) -> FakeTracker:
        tracker = FakeTracker(before)

        def start(name, folder, run_id, *, project, run_name):
            before("start")
            tracker.ids.append(run_id)
            return tracker

        monkeypatch.setattr(tracking, "import_library", lambda name: before("import"))
        monkeypatch.setattr(tracking, "start_tracker", start)
        monkeypatch.setattr(tracking, "SECONDS_TO_STORE", {})
        monkeypatch.setattr(tracking, "KEEP_CONFIG", ("wandb",))
        monkeypatch.setattr(tracking, "run_id_of", lambda name, tracker: "id")
        return tracker

    return use


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    """What a hanging tracker waits for: the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def train(new_record, n_steps: int, **settings) -> tuple[RunRecord, float]:
    """Train some steps, evaluate and end. Return the record, and the seconds that the end took."""
    record, plan = new_record(**FLAGS | settings, logging_steps=1, max_steps=n_steps)
    with record.locate_failures():
        begin(record, plan)
        for step in range(1, n_steps + 1):
            add_steps(record, step)
        record.write_evaluation(n_steps, "test", EVALUATION)
        start = time.monotonic()
    return record, time.monotonic() - start


def warnings(capsys) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]


# ---- what a tracker gets ---------------------------------------------------------------------------------------------


def test_a_tracker_gets_what_is_in_the_files(new_record, track, capsys):
    tracker = track()
    record, _ = train(new_record, 2, learning_rate=0.1)
    lines = [json.loads(line) for line in (record.folder / STEPS.name).read_text().splitlines()]
    for line, (step, values) in zip(lines, tracker.logged, strict=False):
        assert values.pop("train/examples_per_second") == line["examples"] / line["seconds"]
        assert {"step": step} | values == {(f"train/{name}", name)[name == "step"]: line[name] for name in line}
    step, values = tracker.logged[2]
    assert (step, values.pop("eval/epoch") > 0) == (2, True)
    assert values == {f"eval/{name}": value for name, value in EVALUATION.items()}
    assert tracker.config["learning_rate"] == 0.1
    assert tracker.config["path"] == "ddp_loop"
    assert tracker.has_finished
    assert warnings(capsys) == []


def test_the_results_and_their_hash_come_last(new_record, track, monkeypatch):
    tracker = track()
    record, plan = new_record(**FLAGS, max_steps=1)
    monkeypatch.setattr(record_module, "write_results", lambda *_, **__: "f" * 64)
    with record.locate_failures():
        begin(record, plan)
        add_steps(record, 1)
        record.finish(Copies(), nn.Linear(2, 2), tokenizer=None, **correct_predictions(record))
    (step, numbers), (_, texts) = tracker.logged[-2:]
    assert (step, numbers["final/accuracy"], texts) == (1, 1.0, {"final/hash": "f" * 64})
    assert "final/confusion_matrix" not in numbers, "trackers have no type for it"


def interrupt(new_record, fill) -> Resume:
    """Train four steps. Return where the run resumes: after the second one, whose evaluation is repeated."""
    record, plan = new_record(**FLAGS, eval_strategy="steps", eval_steps=1)
    begin(record, plan)
    for step in (1, 2):
        add_steps(record, step)
        record.save_checkpoint(step, fill)
        record.write_evaluation(step, "test", EVALUATION)
    add_steps(record, 3, 4)
    record.trackers.close()
    checkpoint = record.checkpoints.latest_valid
    return Resume(record.folder, checkpoint, json.loads((checkpoint / RUN_STATE).read_text()))


def resume(new_record, point: Resume) -> None:
    record, plan = new_record(point, **FLAGS, eval_strategy="steps", eval_steps=1, learning_rate=0.1)
    with record.locate_failures():
        begin(record, plan)
        record.write_evaluation(2, "test", EVALUATION)
        add_steps(record, 3, 4, 5)
        record.write_evaluation(5, "test", EVALUATION)


def test_a_resumed_run_continues_the_run_of_the_tracker(new_record, track, fill):
    tracker = track()
    point = interrupt(new_record, fill)
    config = dict(tracker.config)
    resume(new_record, point)
    assert tracker.ids == [None, "id"]
    assert tracker.steps("train/loss") == [1, 2, 3, 4, 5], "none is doubled"
    assert tracker.steps("eval/loss") == [1, 2, 5]
    assert tracker.config == config, "MLflow rejects changed values"


def test_what_a_killed_process_may_have_lost_is_sent_again(new_record, track, fill, monkeypatch):
    tracker = track()
    point = interrupt(new_record, fill)
    file = point.folder / TRACKERS / "wandb.json"
    file.write_text(json.dumps({"id": "id", "logged": {"train": 1}}))
    tracker.logged.clear()
    resume(new_record, point)
    assert [(step, next(iter(values))[:5]) for step, values in tracker.logged] == [
        *((1, "eval/"), (2, "train"), (2, "eval/")),  # in the order of steps, which W&B requires
        *((3, "train"), (4, "train"), (5, "train"), (5, "eval/")),
    ]


def test_values_that_a_tracker_may_not_have_stored_yet_are_not_recorded_as_sent(new_record, track, monkeypatch, hang):
    track(lambda name: hang.wait() if name == "finish" else None)
    monkeypatch.setattr(tracking, "SECONDS_TO_STORE", {"wandb": 600})
    monkeypatch.setattr(tracking, "SECONDS_AT_END", 0.5)
    record, _ = train(new_record, 2)
    assert tracking.read_state(record.folder / TRACKERS / "wandb.json") == {"id": "id", "logged": {}}


def test_a_resumed_run_imports_at_once_and_starts_its_tracker_after_the_first_step(new_record, track, fill):
    calls: list[str] = []
    track(calls.append)
    point = interrupt(new_record, fill)
    imported = threading.Event()
    track(lambda name: (calls.append(name), name == "import" and imported.set()))
    calls.clear()
    record, plan = new_record(point, **FLAGS)
    with record.locate_failures():
        begin(record, plan)
        assert imported.wait(10)
        assert calls == ["import"]
        add_steps(record, 3)
    assert calls[:2] == ["import", "start"]


def test_a_run_that_is_resumed_and_fails_at_once_leaves_its_tracker_alone(new_record, track, fill, capsys):
    tracker = track()
    point = interrupt(new_record, fill)
    capsys.readouterr()
    record, plan = new_record(point, **FLAGS)
    begin(record, plan)
    with pytest.raises(ZeroDivisionError), record.locate_failures():
        raise ZeroDivisionError
    assert tracker.ids == [None]
    assert warnings(capsys) == []


def test_only_rank_0_has_trackers(new_record, track):
    record, _ = new_record(**FLAGS)
    assert len(record.trackers.threads) == 1
    object.__setattr__(record.info.world, "rank", 1)
    try:
        assert not record.info.world.is_main_process
        assert tracking.Trackers(record.run_folder, warn=print).threads == []
    finally:
        object.__setattr__(record.info.world, "rank", 0)


# ---- trackers that do not work ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["start", "config", "log", "finish"])
def test_an_exception_without_a_message_is_a_warning_with_its_name(new_record, track, capsys, where):
    def fail(name: str) -> None:
        if name == where:
            raise TimeoutError

    track(fail)
    train(new_record, 5)
    (line,) = warnings(capsys)
    assert "TimeoutError; values may be missing there" in line


@pytest.mark.parametrize("where", ["import", "start", "config", "log", "finish"])
@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), SystemExit(1), ValueError("a\nb\x1b[0m")])
def test_a_tracker_that_raises_is_one_warning(new_record, track, capsys, where, problem):
    def fail(name: str) -> None:
        if name == where:
            raise problem

    tracker = track(fail)
    record, seconds = train(new_record, 5)
    (line,) = warnings(capsys)
    assert line.startswith("warning: --report_to wandb: ")
    assert line.isprintable()
    assert seconds < tracking.SECONDS_AT_END
    assert len((record.folder / STEPS.name).read_text().splitlines()) == 5
    assert tracker.has_finished == (where in ("config", "log"))


def test_a_tracker_that_recovers_gets_the_later_values(new_record, track):
    failures = iter([OSError("unreachable"), OSError("unreachable")])

    def fail_twice(name: str) -> None:
        if name == "log" and (problem := next(failures, None)):
            raise problem

    tracker = track(fail_twice)
    train(new_record, 5)
    assert tracker.steps("train/loss") == [3, 4, 5]


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_a_tracker_that_hangs_costs_a_second_and_a_bounded_queue(new_record, track, capsys, monkeypatch, where, hang):
    if where != "finish":  # otherwise it has room for all steps
        monkeypatch.setattr(tracking, "MAX_QUEUED", 4)
    track(lambda name: hang.wait() if name == where else None)
    record, seconds = train(new_record, 20)
    assert 0.9 < seconds < 2 * tracking.SECONDS_AT_END
    (line,) = warnings(capsys)
    assert ("did not finish within 1 s" if where == "finish" else "does not respond") in line
    assert len((record.folder / STEPS.name).read_text().splitlines()) == 20


@pytest.mark.parametrize(("module", "is_printed"), [("wandb.sender", False), ("torch.distributed", True)])
def test_threads_of_trackers_print_no_traceback(new_record, track, monkeypatch, module, is_printed):
    track()
    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    record, plan = new_record(**FLAGS)
    with record.locate_failures():
        begin(record, plan)
        thread = threading.Thread(target=eval("lambda: 1 / 0", {"__name__": module}))
        thread.start()
        thread.join()
    assert bool(printed) == is_printed
    assert threading.excepthook == printed.append, "restored"


def test_a_slow_tracker_does_not_delay_the_steps(new_record, track, monkeypatch):
    tracker = track(lambda name: time.sleep(0.5))
    record, plan = new_record(**FLAGS)
    begin(record, plan)
    start = time.monotonic()
    add_steps(record, 1, 2)
    assert time.monotonic() - start < 0.5
    record.trackers.close()
    assert not tracker.has_finished


def test_a_failed_run_ends_its_trackers(new_record, track):
    tracker = track()
    record, plan = new_record(**FLAGS)
    begin(record, plan)
    add_steps(record, 1)
    with pytest.raises(ZeroDivisionError), record.locate_failures():
        raise ZeroDivisionError
    assert tracker.steps("train/loss") == [1]
    assert tracker.has_finished


@pytest.mark.parametrize("content", ["", "{", "[]", '{"id": 1}', '{"id": 1, "logged": 3}'])
def test_a_damaged_file_starts_a_new_run_of_the_tracker(tmp_path, content):
    (tmp_path / "wandb.json").write_text(content)
    assert tracking.read_state(tmp_path / "wandb.json") == {}


# ---- the flags -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("report_to", "names"),
    [("none", []), ("wandb", ["wandb"]), ("wandb, mlflow,wandb", ["wandb", "mlflow"]), ("none,mlflow", ["mlflow"])],
)
def test_trackers_are_separated_by_commas(report_to, names):
    assert tracking.requested_trackers(Settings(report_to=report_to).report_to) == names


@pytest.mark.parametrize("report_to", ["", "all", "wandb;mlflow", "wandb,"])
def test_an_unknown_tracker_is_rejected(report_to):
    with pytest.raises(UserError, match="must be one or more of none, tensorboard, trackio"):
        Settings(report_to=report_to)


def test_a_tracker_that_is_not_installed_is_rejected(monkeypatch):
    monkeypatch.setattr(tracking, "is_installed", lambda name: name == "wandb")
    tracking.check_trackers("none", "samebits")
    tracking.check_trackers("wandb", "samebits")
    with pytest.raises(UserError, match=r"^--report_to mlflow: .* pip install 'samebits\[mlflow\]'"):
        tracking.check_trackers("wandb,mlflow", "samebits")


def test_a_folder_that_a_tracker_has_written_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "wandb_of_a_test").mkdir()
    (tmp_path / "package_of_a_test.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert not tracking.is_installed("wandb_of_a_test")
    assert not tracking.is_installed("missing_of_a_test")
    assert tracking.is_installed("package_of_a_test")


@pytest.mark.parametrize(
    ("name", "project", "is_accepted"),
    [
        ("wandb", "hotel reviews", True),
        *(("wandb", project, False) for project in ("a/b", "a\\b", "50%", "x" * 129)),
        ("swanlab", "hotel-reviews_1.0+", True),
        *(("swanlab", project, False) for project in ("hotel reviews", "酒店", "x" * 101)),
        ("mlflow", "a/b %", True),
    ],
)
def test_a_project_that_a_tracker_rejects_is_one_line_before_the_start(monkeypatch, name, project, is_accepted):
    monkeypatch.setattr(tracking, "is_installed", lambda name: True)
    with (
        nullcontext() if is_accepted else pytest.raises(UserError, match=f"^--project .*: --report_to {name} requires")
    ):
        tracking.check_trackers(name, project)
