"""Log a run to experiment trackers, such as TensorBoard or MLflow, without ever waiting for them.

Each tracker has a daemon thread on rank 0, which alone calls the tracker's library. The training thread only puts
values into a bounded queue. So a tracker that raises, hangs, or whose service is killed loses values, but cannot stop
or change the training.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from queue import Full, Queue
from typing import Any

from ..common.errors import UserError, escape_control_characters, shorten
from ..common.valid import split_names
from ..runs.schema import EVALUATIONS, LOGS, METRICS, STEPS, TRACKERS
from .run_folder import RunFolder, settings_content
from .trackers import check_project, import_library, is_installed, log_values, run_id_of, silence_threads, start_tracker

MAX_QUEUED = 1000  # logging intervals and evaluations that wait for a tracker; further ones are dropped
SECONDS_AT_END = 1.0  # that the trackers have, together, after the last result
# After a killed process, these trackers may lack the values of the last seconds. They are sent again, perhaps doubled.
SECONDS_TO_STORE = {"trackio": 1.0, "wandb": 20.0, "swanlab": 20.0}
KEEP_CONFIG = ("mlflow", "tensorboard")  # the first rejects changed values, such as other flags; the second adds to it
PREFIXES = {STEPS.name: "train", EVALUATIONS.name: "eval", METRICS.name: "final"}

Lines = Sequence[Mapping[str, Any]]


def requested_trackers(report_to: str) -> list[str]:
    """Return the names in `--report_to`, each once."""
    return [name for name in dict.fromkeys(split_names(report_to)) if name != "none"]


def check_trackers(report_to: str, project: str) -> None:
    """Check that the packages of the requested trackers are installed, and that these accept the project.

    Raises:
        UserError: a package is missing, or the project's name is rejected.
    """
    for name in requested_trackers(report_to):
        if not is_installed(name):
            raise UserError(
                f"--report_to {name}: its package is not installed: run pip install 'samebits[{name}]', or pip install "
                f"{name}"
            )
        check_project(name, project)


class Trackers:
    """The trackers of a run. Without any, and on other ranks than 0, the methods do nothing."""

    def __init__(self, run_folder: RunFolder, warn: Callable[[str], None]) -> None:
        """`warn` prints a warning, of which each tracker causes at most one."""
        self.run_folder, self.warn, self.silenced = run_folder, warn, ExitStack()
        folder, info = run_folder.path, run_folder.info
        settings = info.settings
        run_name = settings.run_name or f"{info.path_name}-{folder.name}"
        self.threads = [
            TrackerThread(name, folder, project=settings.project, run_name=run_name)
            for name in (requested_trackers(settings.report_to) if info.world.is_main_process else [])
        ]

    def start(self) -> None:
        """Start the threads, which import the libraries and then wait for `allow_writes`."""
        if not self.threads:
            return
        self.silenced.enter_context(silence_threads())
        config = settings_content(self.run_folder.info, self.run_folder.resume.launchers)
        for thread in self.threads:
            thread.config = {name: value for name, value in config.items() if isinstance(value, int | float | str)}
            thread.earlier = self._earlier
            thread.start()

    def allow_writes(self) -> None:
        """Let the trackers begin. Call it once the run's folder has been reset."""
        for thread in self.threads:
            thread.may_write.set()

    def _earlier(self) -> list[tuple[str, Lines]]:
        """Return the lines up to the checkpoint, in the order of steps: a killed process may have lost some of them."""
        before = {EVALUATIONS.name: self.run_folder.step_to_evaluate}  # it is repeated
        lines = [
            (PREFIXES[file], [json.loads(line)])
            for file in LOGS
            for line in self.run_folder.resume.lines_of(file, before.get(file))
        ]
        return sorted(lines, key=lambda item: item[1][0]["step"])

    def log(self, file: str, lines: Lines) -> None:
        """Log lines as they are written to a file of the run, and warn about problems."""
        for thread in self.threads:
            thread.put(PREFIXES[file], lines)
            self._warn_once(thread)

    def close(self) -> None:
        """Give all trackers together `SECONDS_AT_END` to finish. A thread that hangs ends with the process."""
        deadline = time.monotonic() + SECONDS_AT_END
        started = [thread for thread in self.threads if thread.may_write.is_set()]
        for thread in started:
            thread.put_end()
        for thread in started:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                thread.problem = thread.problem or f"did not finish within {SECONDS_AT_END:g} s"
            self._warn_once(thread)
        self.threads = []
        self.silenced.close()

    def _warn_once(self, thread: TrackerThread) -> None:
        if thread.problem and not thread.has_warned:
            thread.has_warned = True
            problem = escape_control_characters(shorten(" ".join(thread.problem.split()), 200))
            consequence = "values may be missing there; the run and its files are not affected"
            self.warn(f"warning: --report_to {thread.tracker_name}: {problem}; {consequence}")


class TrackerThread(threading.Thread):
    """The only thread that calls a tracker. The methods, except `run`, are called by the training thread.

    Attributes:
        config: the values that describe the run; set it before `start`.
        earlier: returns the lines of a resumed run up to its checkpoint, by prefix; set it before `start`.
        problem: why values are missing in the tracker, or None.
    """

    def __init__(self, name: str, folder: Path, *, project: str, run_name: str) -> None:
        super().__init__(name=f"tracker-{name}", daemon=True)  # the process can exit while a tracker hangs
        self.tracker_name, self.project, self.run_name = name, project, run_name
        self.state_file = folder / TRACKERS / f"{name}.json"
        self.may_write = threading.Event()
        self.config: Mapping[str, Any] = {}
        self.earlier: Callable[[], Iterable[tuple[str, Lines]]] = list
        self.queue: Queue[tuple[str, Lines] | None] = Queue(MAX_QUEUED)
        self.problem: str | None = None
        self.has_warned = False
        self.sent: deque[tuple[float, str, int]] = deque()  # time, prefix and step of values that may not be stored yet

    def put(self, prefix: str, lines: Lines) -> None:
        try:
            self.queue.put_nowait((prefix, lines))
        except Full:
            self.problem = self.problem or "does not respond"

    def put_end(self) -> None:
        """Let the thread finish after the values that wait."""
        with suppress(Full):  # then it hangs
            self.queue.put_nowait(None)

    # ---- in the thread ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        name = self.tracker_name
        try:
            import_library(name)
            self.may_write.wait()  # if the run fails before, the process ends while this waits
            state = read_state(self.state_file)
            tracker = start_tracker(
                name, self.state_file.parent, state.get("id"), project=self.project, run_name=self.run_name
            )
            is_new = not state
            self.state = state or {"id": run_id_of(name, tracker), "logged": {}}
            self.has = dict(self.state["logged"])
        except BaseException as problem:  # some libraries raise SystemExit
            self.problem = f"could not be started: {describe(problem)}"
            return
        self.attempt(self.write_state)
        if is_new or name not in KEEP_CONFIG:
            self.attempt(partial(tracker.store_init_configuration, dict(self.config)))
        self.attempt(partial(self.log_earlier, tracker))
        while (item := self.queue.get()) is not None:
            self.attempt(partial(self.log_lines, tracker, item))
        self.attempt(tracker.finish)
        if self.problem is None:
            self.attempt(partial(self.write_state, is_finished=True))

    def attempt(self, action: Callable[[], object]) -> None:
        """Call a function. After a problem, which may be temporary, the next values are tried again."""
        try:
            action()
        except BaseException as problem:
            self.problem = self.problem or describe(problem)

    def log_earlier(self, tracker: Any) -> None:
        for item in self.earlier():
            self.log_lines(tracker, item)

    def log_lines(self, tracker: Any, item: tuple[str, Lines]) -> None:
        """Log the lines that the tracker does not have yet. A resumed run repeats steps, with equal values."""
        prefix, lines = item
        for line in lines:
            if (step := line["step"]) > self.has.get(prefix, 0):
                if prefix == PREFIXES[STEPS.name]:
                    line = {**line, "examples_per_second": line["examples"] / line["seconds"]}
                values = {f"{prefix}/{name}": value for name, value in line.items() if name != "step"}
                log_values(self.tracker_name, tracker, values, step=step)
                self.sent.append((time.monotonic(), prefix, step))
                self.write_state()

    def write_state(self, is_finished: bool = False) -> None:
        """Write the id of the tracker's run, and the last step of each prefix that a killed process does not lose.

        The file is replaced, but not flushed to disk, which could slow down the training's own files.
        """
        stored_before = time.monotonic() - (0 if is_finished else SECONDS_TO_STORE.get(self.tracker_name, 0))
        while self.sent and self.sent[0][0] <= stored_before:
            _, prefix, step = self.sent.popleft()
            self.state["logged"][prefix] = step
        self.state_file.parent.mkdir(exist_ok=True)
        staging = self.state_file.with_name(f".{self.state_file.name}.tmp")
        staging.write_text(json.dumps(self.state) + "\n", encoding="utf-8")
        os.replace(staging, self.state_file)


def describe(problem: BaseException) -> str:
    return str(problem).strip() or type(problem).__name__


def read_state(path: Path) -> dict[str, Any]:
    """Return the id of a tracker's run, and the last step of each prefix that was logged; nothing for a new run."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return {"id": state["id"], "logged": dict(state["logged"])}
    except (OSError, ValueError, KeyError, TypeError):  # damaged by a power failure: it is not flushed to disk
        return {}
