"""What differs between the trackers of accelerate: how a run is named, continued, and described.

`is_installed` and `check_project` check the flags before the start. Only the thread of a tracker calls the other
functions (see `tracking.py`). They reach the trackers' libraries through `accelerate.tracking` alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import threading
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..common.errors import UserError, shorten
from ..setting_groups.running import TRACKERS

TENSORBOARD_LOGGING_DIR = "TENSORBOARD_LOGGING_DIR"
# Names of projects that the services accept (W&B 0.31, SwanLab 0.10). They reject others only after the start.
PROJECT_NAMES = {
    "wandb": (re.compile(r"[^/\\#?%:]{1,128}"), "at most 128 characters and none of / \\ # ? % :"),
    "swanlab": (re.compile(r"[0-9a-zA-Z_.+-]{1,100}"), "at most 100 characters of 0-9, a-z, A-Z and - _ . +"),
}
LOG_TEXT = ("tensorboard", "wandb", "trackio")  # the others log numbers only, so their config gets the hash


def is_installed(name: str) -> bool:
    """Tell whether the library of a tracker is installed, without importing it."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None  # a folder such as ./wandb, which W&B writes, has no origin


def check_project(name: str, project: str) -> None:
    """Raise `UserError` if a tracker would reject the name of the project."""
    pattern, allowed = PROJECT_NAMES.get(name, (None, ""))
    if pattern is not None and not pattern.fullmatch(project):
        raise UserError(f"--project {shorten(project)}: --report_to {name} requires {allowed}")


def import_library(name: str) -> None:
    """Import what `start_tracker` needs, which takes seconds and has no other effect."""
    importlib.import_module("accelerate.tracking")  # here, because only runs with --report_to need it
    importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)


def start_tracker(name: str, folder: Path, run_id: str | None, *, project: str, run_name: str) -> Any:
    """Start a tracker of accelerate, and with it a new run, or the run that `run_id` identifies.

    Args:
        folder: for the files of TensorBoard. Other trackers have their own environment variables for it.
    """
    from accelerate import tracking

    # accelerate's own logger works only after an Accelerator has been created, which `ddp_loop` never does.
    tracking.logger = logging.getLogger(tracking.__name__)
    create = tracking.LOGGER_TYPE_TO_CLASS[name]
    if name == "tensorboard":
        tracker = create(*tensorboard_folder(folder, run_id, project=project, run_name=run_name))
    elif name == "mlflow":
        create_mlflow_database()
        tracker = create(project, run_name=run_name, run_id=run_id)
    elif name == "trackio":  # a run is identified by its name
        tracker = create(project, name=run_id or unique(run_name), resume="allow" if run_id else "never")
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


def unique(run_name: str) -> str:
    """Return a name that no other run has, for trackers that would mix runs of the same name."""
    return f"{run_name}-{uuid.uuid4().hex[:6]}"


def tensorboard_folder(folder: Path, run_id: str | None, *, project: str, run_name: str) -> tuple[str, Path]:
    """Return the name of the folder of TensorBoard's files and the folder that contains it.

    TensorBoard shows each folder as a run. `folder` belongs to a single run, and TENSORBOARD_LOGGING_DIR to many.
    """
    if run_id:
        return Path(run_id).name, Path(run_id).parent
    if not (base := os.environ.get(TENSORBOARD_LOGGING_DIR)) or (folder / "tensorboard").is_dir():
        return "tensorboard", folder
    project, run_name = (re.sub(r"[^\w-]", "_", text)[:60] for text in (project, run_name))
    return unique(run_name), Path(base).absolute() / project


def create_mlflow_database() -> None:
    """Create MLflow's database if it is a SQLite file that does not exist yet.

    MLflow takes seconds to create the tables. If the process exits meanwhile, the file can never be used again, so it
    gets its name when it is complete.
    """
    mlflow: Any = importlib.import_module("mlflow")
    scheme, _, name = mlflow.get_tracking_uri().partition("?")[0].partition(":///")
    path = Path(name).absolute()
    if scheme != "sqlite" or name in ("", ":memory:") or path.exists():
        return
    staging = path.with_name(f".{path.name}.{uuid.uuid4().hex[:6]}.tmp")
    mlflow.MlflowClient(tracking_uri=f"sqlite:///{staging}").search_experiments(max_results=1)
    with suppress(OSError):  # another process has created the file meanwhile, or the file system has no hard links
        os.link(staging, path)
    if path.exists():
        staging.unlink()
    else:
        staging.rename(path)


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
    if name == "tensorboard":  # its files are in the run's folder, which may be moved, unless the user chose another
        return os.path.abspath(tracker.logging_dir) if os.environ.get(TENSORBOARD_LOGGING_DIR) else None
    return str(run.name if name == "trackio" else run.id)


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
