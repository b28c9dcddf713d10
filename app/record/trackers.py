"""Log a run to experiment trackers, such as TensorBoard or MLflow, through those of accelerate, on rank 0.

A tracker that fails costs one warning, and is not used again. The files of the run never depend on it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..common.errors import escape_control_characters, shorten
from ..runs.schema import EVALUATIONS, LOCK, METRICS, STEPS, TRACKERS
from ..training.prepare import Preparation
from .run_folder import settings_content

PREFIXES = {STEPS.name: "train", EVALUATIONS.name: "eval", METRICS.name: "final"}
NO_METRICS = ("positive_class",)  # the number of a class
LOG_TEXT = ("tensorboard", "wandb", "trackio")  # the others log numbers only
# Otherwise they redirect the output of the whole process.
QUIET = {
    "wandb": {"console": "off", "silent": True},
    "swanlab": {"terminal": {"proxy_type": "none"}, "interactive": False},
}


class Trackers:
    """The trackers of a run. Without any, and on other ranks than 0, the methods do nothing."""

    def __init__(self, run: Preparation) -> None:
        self.run = run
        self.started: dict[str, Any] = {}

    def start(self) -> None:
        """Start the trackers. A run that resumes in its folder continues its run of the tracker."""
        for name in self.run.settings.trackers if self.run.world.is_main_process else []:
            with self._drop_if_it_fails(name):
                self.started[name] = tracker = build(name, self.run)
                tracker.main_process_only = False  # otherwise accelerate initializes its own state, with the device
                tracker.start()
                config = settings_content(self.run)
                tracker.store_init_configuration({k: v for k, v in config.items() if isinstance(v, int | float | str)})

    def log(self, file: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Log lines as they are written to a file of the run."""
        for line in map(dict, lines if file in PREFIXES else ()):
            step = line.pop("step")
            if file == STEPS.name:
                line["examples_per_second"] = line["examples"] / line["seconds"]
            metrics = {k: value for k, value in line.items() if isinstance(value, int | float) and k not in NO_METRICS}
            numbers = {f"{PREFIXES[file]}/{k}": value for k, value in metrics.items()}
            for name, tracker in list(self.started.items()):
                with self._drop_if_it_fails(name):
                    # Without these arguments, TensorBoard would round to fp32.
                    exact = {"new_style": True, "double_precision": True} if name == "tensorboard" else {}
                    tracker.log(numbers, step=step, **exact)
                    if "hash" in line and name in LOG_TEXT:
                        tracker.log({"final/hash": line["hash"]}, step=step)

    def close(self) -> None:
        """Let the trackers finish."""
        for name, tracker in list(self.started.items()):
            with self._drop_if_it_fails(name):
                tracker.finish()

    @contextmanager
    def _drop_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as problem:  # some libraries exit
            self.started.pop(name, None)
            text = escape_control_characters(shorten(" ".join(str(problem or type(problem).__name__).split()), 200))
            warning = f"warning: --report_to {name}: {text}; it gets no more values, the run is not affected"
            self.run.world.print_main(warning)


def build(name: str, run: Preparation) -> Any:
    """Return one of accelerate's trackers, which has not been started."""
    from accelerate import tracking  # here, because only runs with --report_to need it

    # accelerate's own logger works only after an Accelerator has been created, which `ddp_loop` never does.
    tracking.logger = logging.getLogger(tracking.__name__)
    tracker, project = tracking.LOGGER_TYPE_TO_CLASS[name], run.settings.project
    run_name = run.settings.run_name or f"{run.path_name}-{run.folder.name}"
    # The folder identifies the run, and the time of its lock, which is written once, a new run in the same folder.
    created = (run.folder / LOCK).stat().st_mtime_ns
    run_id = hashlib.sha256(f"{run.folder.resolve()} {created}".encode()).hexdigest()[:21]
    if name == "tensorboard":  # it shows each folder as a run
        base = os.environ.get("TENSORBOARD_LOGGING_DIR")
        return tracker(run_id, Path(base) / project) if base else tracker(name, run.folder / TRACKERS)
    if name == "mlflow":
        return tracker(project, run_name=run_name)
    if name == "trackio":  # a run is identified by its name
        return tracker(project, name=f"{run_name}-{run_id[:6]}", resume="allow")
    return tracker(project, name=run_name, id=run_id, resume="allow", settings=QUIET[name])
