"""What differs between the trackers of accelerate: how a run is named, continued, and described.

Only the thread of a tracker calls these functions (see `tracking.py`). They reach the trackers' libraries through
`accelerate.tracking` alone.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..setting_groups.running import TRACKERS

LOG_TEXT = ("tensorboard", "wandb", "trackio")  # the others log numbers only, so their config gets the hash


def start_tracker(name: str, folder: Path, run_id: str | None, *, project: str, run_name: str) -> Any:
    """Start a tracker of accelerate, and with it a new run, or the run that `run_id` identifies.

    Args:
        folder: for the files of TensorBoard. Other trackers have their own environment variables for it.
    """
    from accelerate import tracking  # here, because only runs with --report_to need it

    # accelerate's own logger works only after an Accelerator has been created, which `ddp_loop` never does.
    tracking.logger = logging.getLogger(tracking.__name__)
    create = tracking.LOGGER_TYPE_TO_CLASS[name]
    if name == "tensorboard":
        tracker = create(name, os.environ.get("TENSORBOARD_LOGGING_DIR", folder))
    elif name == "mlflow":
        tracker = create(project, run_name=run_name, run_id=run_id)
    elif name == "trackio":  # a run is identified by its name
        tracker = create(project, name=run_id or run_name, resume="allow" if run_id else "never")
    else:
        # Otherwise they redirect the output of the whole process, and what the training prints has to wait for them.
        settings: dict[str, Any] = {"terminal": {"proxy_type": "none"}, "interactive": False}
        if name == "wandb":
            settings = {"console": "off", "silent": True}
        resumed = {"id": run_id, "resume": "allow"} if run_id else {}
        tracker = create(project, name=run_name, settings=settings, **resumed)
    tracker.main_process_only = False  # otherwise accelerate initializes its own state, which includes the device
    tracker.start()
    if name == "mlflow":
        logging.getLogger(name).setLevel(logging.CRITICAL)  # otherwise each failed write logs a traceback, too
    return tracker


@contextmanager
def silence_threads() -> Iterator[None]:
    """Let no thread that a tracker's library has started print a traceback inside the block, such as on a full disk."""
    print_traceback, raise_exceptions = threading.excepthook, logging.raiseExceptions

    def hook(arguments: threading.ExceptHookArgs) -> None:
        names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(arguments.exc_traceback)]
        if not {name.partition(".")[0] for name in names} & set(TRACKERS):
            print_traceback(arguments)

    threading.excepthook, logging.raiseExceptions = hook, False  # the latter if a log file cannot be written
    try:
        yield
    finally:
        threading.excepthook, logging.raiseExceptions = print_traceback, raise_exceptions


def run_id_of(name: str, tracker: Any) -> str | None:
    """Return what identifies the run, to continue it."""
    run = tracker.tracker
    if name == "mlflow":
        return str(run.info.run_id)
    return None if name == "tensorboard" else str(run.name if name == "trackio" else run.id)


def log_values(name: str, tracker: Any, values: Mapping[str, Any], *, step: int) -> None:
    """Log the numbers and, if the tracker accepts them, the texts among some values."""
    numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
    # Without these arguments, TensorBoard would round to fp32.
    exact = {"new_style": True, "double_precision": True} if name == "tensorboard" else {}
    if numbers:
        tracker.log(numbers, step=step, **exact)
    texts = {key: value for key, value in values.items() if isinstance(value, str) and key.endswith("/hash")}
    if texts and name in LOG_TEXT:
        tracker.log(texts, step=step)
    elif texts:
        tracker.store_init_configuration(texts)
