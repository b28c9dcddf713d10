"""Log a run to experiment trackers, such as TensorBoard or MLflow, through those of accelerate, on rank 0.

A tracker that fails costs one warning, and is not used again. The files of the run never depend on it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..common.errors import escape_control_characters, shorten
from ..runs.schema import EVALUATIONS, LOCK, METRICS, STEPS, TRACKERS
from ..training.prepare import Preparation
from .run_folder import settings_content

TENSORBOARD_LOGGING_DIR = "TENSORBOARD_LOGGING_DIR"
PREFIXES = {STEPS.name: "train", EVALUATIONS.name: "eval", METRICS.name: "final"}
LOG_TEXT = ("tensorboard", "wandb", "trackio")  # the others log numbers only
# Otherwise they redirect the output of the whole process.
QUIET = {
    "wandb": {"console": "off", "silent": True},
    "swanlab": {"terminal": {"proxy_type": "none"}, "interactive": False},
}


class Trackers:
    """The trackers of a run. Without any, and on other ranks than 0, the methods do nothing."""

    def __init__(self, run: Preparation, warn: Callable[[str], None]) -> None:
        """`warn` prints a warning, of which each tracker causes at most one."""
        self.run, self.folder, self.warn = run, run.folder, warn
        self.names = run.settings.trackers if run.world.is_main_process else []
        self.started: dict[str, Any] = {}

    def start(self) -> None:
        """Start the trackers. A run that resumes in its folder continues its run of the tracker."""
        for name in self.names:
            self._attempt(name, partial(self._start, name))

    def _start(self, name: str) -> None:
        from accelerate import tracking  # here, because only runs with --report_to need it

        # accelerate's own logger works only after an Accelerator has been created, which `ddp_loop` never does.
        tracking.logger = logging.getLogger(tracking.__name__)
        create, project = tracking.LOGGER_TYPE_TO_CLASS[name], self.run.settings.project
        run_name = self.run.settings.run_name or f"{self.run.path_name}-{self.folder.name}"
        # The folder identifies the run, and the time of its lock, which is written once, a new run in the same folder.
        created = (self.folder / LOCK).stat().st_mtime_ns
        run_id = hashlib.sha256(f"{self.folder.resolve()} {created}".encode()).hexdigest()[:21]
        if name == "tensorboard":  # it shows each folder as a run
            base = os.environ.get(TENSORBOARD_LOGGING_DIR)
            place = (f"{run_id}", Path(base) / project) if base else (name, self.folder / TRACKERS)
            tracker = create(*place)
        elif name == "mlflow":
            tracker = create(project, run_name=run_name)
        elif name == "trackio":  # a run is identified by its name
            tracker = create(project, name=f"{run_name}-{run_id[:6]}", resume="allow")
        else:
            tracker = create(project, name=run_name, id=run_id, resume="allow", settings=QUIET[name])
        tracker.main_process_only = False  # otherwise accelerate initializes its own state, which includes the device
        tracker.start()
        config = settings_content(self.run).items()
        tracker.store_init_configuration({key: value for key, value in config if isinstance(value, int | float | str)})
        self.started[name] = tracker

    def log(self, file: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Log lines as they are written to a file of the run."""
        for name, tracker in list(self.started.items()):
            self._attempt(name, partial(self._log, name, tracker, file=file, lines=lines))

    def _log(self, name: str, tracker: Any, *, file: str, lines: Sequence[Mapping[str, Any]]) -> None:
        # Without these arguments, TensorBoard would round to fp32.
        exact = {"new_style": True, "double_precision": True} if name == "tensorboard" else {}
        for line in lines:
            if file == STEPS.name:
                line = {**line, "examples_per_second": line["examples"] / line["seconds"]}
            values = {f"{PREFIXES[file]}/{key}": value for key, value in line.items() if key != "step"}
            numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
            tracker.log(numbers, step=line["step"], **exact)
            if "hash" in line and name in LOG_TEXT:
                tracker.log({"final/hash": line["hash"]}, step=line["step"])

    def close(self) -> None:
        """Let the trackers finish."""
        for name, tracker in list(self.started.items()):
            self._attempt(name, tracker.finish)
        self.started.clear()

    def _attempt(self, name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except (Exception, SystemExit) as problem:  # some libraries exit
            self.started.pop(name, None)
            text = escape_control_characters(shorten(" ".join(str(problem or type(problem).__name__).split()), 200))
            self.warn(f"warning: --report_to {name}: {text}; it gets no more values, the run is not affected")
