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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Full, Queue
from typing import Any

from ..common.errors import UserError, escape_control_characters, shorten
from ..common.valid import split_names
from ..runs.schema import EVALUATIONS, METRICS, STEPS, TRACKERS
from .run_folder import RunFolder, settings_content
from .trackers import log_values, run_id_of, start_tracker

MAX_QUEUED = 1000  # logging intervals and evaluations that wait for a tracker; further ones are dropped
SECONDS_AT_END = 1.0  # that the trackers have, together, after the last result
PREFIXES = {STEPS.name: "train", EVALUATIONS.name: "eval", METRICS.name: "final"}

Lines = Sequence[Mapping[str, Any]]


def requested_trackers(report_to: str) -> list[str]:
    """Return the names in `--report_to`, each once."""
    return [name for name in dict.fromkeys(split_names(report_to)) if name != "none"]


def check_trackers(report_to: str) -> None:
    """Check that the packages of the requested trackers are installed, without importing them.

    Raises:
        UserError: one is missing.
    """
    if names := requested_trackers(report_to):
        from accelerate.tracking import get_available_trackers  # here, because other runs do not need it

        available = {str(name) for name in get_available_trackers()}
        if missing := [name for name in names if name not in available]:
            raise UserError(
                f"--report_to {missing[0]}: its package is not installed: run pip install 'samebits[{missing[0]}]', or "
                f"pip install {missing[0]}"
            )


class Trackers:
    """The trackers of a run. Without any, and on other ranks than 0, the methods do nothing."""

    def __init__(self, run_folder: RunFolder, warn: Callable[[str], None]) -> None:
        """`warn` prints a warning, of which each tracker causes at most one."""
        self.run_folder, self.warn = run_folder, warn
        folder, info = run_folder.path, run_folder.info
        settings = info.settings
        run_name = settings.run_name or f"{info.path_name}-{folder.name}"
        self.threads = [
            TrackerThread(name, folder, project=settings.project, run_name=run_name)
            for name in (requested_trackers(settings.report_to) if info.world.is_main_process else [])
        ]

    def start(self) -> None:
        for thread in self.threads:
            config = settings_content(self.run_folder.info, self.run_folder.resume.launchers)
            thread.config = {name: value for name, value in config.items() if isinstance(value, int | float | str)}
            thread.start()

    def log(self, file: str, lines: Lines) -> None:
        """Log lines as they are written to a file of the run, and warn about problems."""
        for thread in self.threads:
            thread.put(PREFIXES[file], lines)
            self._warn_once(thread)

    def close(self) -> None:
        """Give all trackers together `SECONDS_AT_END` to finish. A thread that hangs ends with the process."""
        deadline = time.monotonic() + SECONDS_AT_END
        started = [thread for thread in self.threads if thread.ident is not None]
        for thread in started:
            thread.put_end()
        for thread in started:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                thread.problem = thread.problem or f"did not finish within {SECONDS_AT_END:g} s"
            self._warn_once(thread)
        self.threads = []

    def _warn_once(self, thread: TrackerThread) -> None:
        if thread.problem and not thread.has_warned:
            thread.has_warned = True
            problem = escape_control_characters(shorten(" ".join(thread.problem.split()), 200))
            self.warn(
                f"warning: --report_to {thread.tracker_name}: {problem}; training continues, without values there"
            )


class TrackerThread(threading.Thread):
    """The only thread that calls a tracker. The methods, except `run`, are called by the training thread.

    Attributes:
        config: the values that describe the run; set it before `start`.
        problem: why values are missing in the tracker, or None.
    """

    def __init__(self, name: str, folder: Path, *, project: str, run_name: str) -> None:
        super().__init__(name=f"tracker-{name}", daemon=True)  # the process can exit while a tracker hangs
        self.tracker_name, self.project, self.run_name = name, project, run_name
        self.state_file = folder / TRACKERS / f"{name}.json"
        self.config: Mapping[str, Any] = {}
        self.queue: Queue[tuple[str, Lines] | None] = Queue(MAX_QUEUED)
        self.problem: str | None = None
        self.has_warned = False

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
        try:
            state = read_state(self.state_file)
            tracker = start_tracker(
                self.tracker_name,
                self.state_file.parent,
                state.get("id"),
                project=self.project,
                run_name=self.run_name,
            )
            is_new = not state
            state = state or {"id": run_id_of(self.tracker_name, tracker), "logged": {}}
        except BaseException as problem:  # some libraries raise SystemExit
            self.problem = f"could not be started: {problem or type(problem).__name__}"
            return
        if is_new:  # a resumed run has other flags, and MLflow rejects a changed value
            self.attempt(partial(tracker.store_init_configuration, dict(self.config)))
        while (item := self.queue.get()) is not None:
            self.attempt(partial(self.log_lines, tracker, state, item))
        self.attempt(tracker.finish)

    def attempt(self, action: Callable[[], None]) -> None:
        """Call a function. After a problem, which may be temporary, the next values are tried again."""
        try:
            action()
        except BaseException as problem:
            self.problem = self.problem or f"{problem or type(problem).__name__}"

    def log_lines(self, tracker: Any, state: dict[str, Any], item: tuple[str, Lines]) -> None:
        """Log the lines that the tracker does not have yet. A resumed run repeats steps, with equal values."""
        (prefix, lines), logged = item, state["logged"]
        for line in lines:
            if line["step"] > logged.get(prefix, 0):
                logged[prefix] = line["step"]
                if prefix == PREFIXES[STEPS.name]:
                    line = {**line, "examples_per_second": line["examples"] / line["seconds"]}
                values = {f"{prefix}/{name}": value for name, value in line.items() if name != "step"}
                log_values(self.tracker_name, tracker, values, step=line["step"])
        write_state(self.state_file, state)


def read_state(path: Path) -> dict[str, Any]:
    """Return the id of a tracker's run, and the last step of each prefix that was logged; nothing for a new run."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return {"id": state["id"], "logged": dict(state["logged"])}
    except (OSError, ValueError, KeyError, TypeError):  # damaged by a power failure: it is not flushed to disk
        return {}


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Replace the file. It is not flushed to disk, which could slow down the training's own files."""
    path.parent.mkdir(exist_ok=True)
    staging = path.with_name(f".{path.name}.tmp")
    staging.write_text(json.dumps(state) + "\n", encoding="utf-8")
    os.replace(staging, path)
