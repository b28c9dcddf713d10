"""The environment variables that torchrun sets for each process. No other file reads them."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from ..common.cores import usable_cores
from ..common.errors import UserError, shorten
from ..setting_groups import MAX_THREADS

LOWEST = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
LOWEST |= {"TORCHELASTIC_RESTART_COUNT": 0}
NEEDED_BY_RANK = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SINGLE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
REMEDY = "start with torchrun, or unset it"


def check_environment() -> None:
    """Raise `UserError` if a variable is invalid, or set without the variables that it requires."""
    values = {name: _number(name, os.environ[name], LOWEST[name]) for name in LOWEST if name in os.environ}
    rank, size = values.get("RANK"), values.get("WORLD_SIZE", 1)
    if rank is None:
        if size > 1:
            raise UserError(f"WORLD_SIZE={size} is set, but RANK is not: {REMEDY}")
        return
    for name in NEEDED_BY_RANK:
        if not os.environ.get(name):
            raise UserError(f"RANK={rank} is set, but {name} is not: {REMEDY}")
    for place, count in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if values[place] >= values[count]:
            raise UserError(f"{place}={values[place]}: must be less than {count}={values[count]}: {REMEDY}")


def _number(name: str, text: str, lowest: int) -> int:
    # At most 9 digits: enough for any number of processes, and int() rejects very long numbers.
    if text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) >= lowest:
        return int(text)
    raise UserError(f"{name}={shorten(text)!r}: must be a whole number, {lowest} or more: {REMEDY}")


# The values that accelerate.utils.str_to_bool accepts.
TRUE, FALSE = {"y", "yes", "t", "true", "on", "1"}, {"n", "no", "f", "false", "off", "0"}
UNSUPPORTED_BACKENDS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "accelerate's parallelism config",
    "ACCELERATE_USE_SAGEMAKER": "SageMaker's data parallelism",
}
INSTEAD = dict.fromkeys(("DeepSpeed", "FSDP"), "unset it, and use --strategy")
DYNAMO_FLAGS = ("USE_FULLGRAPH", "USE_DYNAMIC", "USE_REGIONAL_COMPILATION")


def check_accelerate_environment(precision: str, use_cpu: bool) -> None:
    """Raise `UserError` if a variable that `accelerate launch` exports contradicts the settings.

    Trainer and accelerate read these variables and the hand-written loop does not, so the two paths would silently
    train differently. Variables that agree with the settings or have no effect are accepted; plain `accelerate launch`
    sets several of them.
    """
    exported = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if exported == precision == "fp16":
        remedy = "unset it: --precision fp16 scales the loss itself"
        raise _contradiction("ACCELERATE_MIXED_PRECISION", "accelerate would scale the loss a second time", remedy)
    if exported not in ("no", "bf16" if precision == "bf16" else "no"):
        remedy = "add --precision bf16, or unset it" if exported == "bf16" else "unset it, and use --precision"
        raise _contradiction("ACCELERATE_MIXED_PRECISION", f"the settings say --precision {precision}", remedy)
    for name, backend in UNSUPPORTED_BACKENDS.items():
        if _is_true(name):
            reason = "the settings select the strategy" if backend in INSTEAD else f"{backend} is not supported"
            raise _contradiction(name, reason, INSTEAD.get(backend, "unset it"))
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise _contradiction("ACCELERATE_DYNAMO_BACKEND", "torch.compile is not supported", "unset it")
    for flag in DYNAMO_FLAGS:  # no effect without a backend, but accelerate fails on other values
        _is_true(f"ACCELERATE_DYNAMO_{flag}")
    if _is_true("ACCELERATE_USE_CPU") and _uses_gpu(use_cpu):
        raise _contradiction("ACCELERATE_USE_CPU", "the settings select the GPU", "add --use_cpu, or unset it")
    device = os.environ.get("ACCELERATE_TORCH_DEVICE")
    if device is not None and (device != "cpu" or _uses_gpu(use_cpu)):
        remedy = "unset it, and use --use_cpu or CUDA_VISIBLE_DEVICES"
        raise _contradiction("ACCELERATE_TORCH_DEVICE", "the settings select the device", remedy)


def _uses_gpu(use_cpu: bool) -> bool:
    import torch  # here: without these variables, a user's mistake need not wait for it

    return not use_cpu and torch.cuda.is_available()


def _contradiction(name: str, reason: str, remedy: str) -> UserError:
    return UserError(f"{name}={shorten(os.environ[name])} (as set by accelerate), but {reason}: {remedy}")


def _is_true(name: str) -> bool:
    """Parse a boolean variable as accelerate does; unset means false."""
    text = os.environ.get(name, "false").lower()
    if text not in TRUE | FALSE:
        raise UserError(f"{name}={shorten(text)!r}: must be true or false; unset it")
    return text in TRUE


def started_by_torchrun() -> bool:
    """Whether a launcher started this process: plain `python -m …` sets no RANK."""
    return "RANK" in os.environ


def become_single_process() -> None:
    """Set the variables of a job of one process, which accelerate reads."""
    os.environ.update(SINGLE_PROCESS)


def rank_and_sizes() -> tuple[int, int, int, int]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, by default of a single process."""
    rank, size, local_rank, local_size = (int(os.environ.get(name, alone)) for name, alone in SINGLE_PROCESS.items())
    return rank, size, local_rank, local_size


def master_endpoint() -> str:
    """Return the address and the port at which the ranks meet; empty for a single process."""
    return ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ)


def split_off_local_rank(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide a command line into the program's own arguments and the `--local-rank=N` of torch.distributed.launch."""
    added = [text for text in arguments if text.startswith(("--local-rank=", "--local_rank="))]
    return [text for text in arguments if text not in added], added


def check_local_rank(arguments: Sequence[str]) -> None:
    """Raise `UserError` if an argument from `split_off_local_rank` contradicts LOCAL_RANK."""
    local_rank = rank_and_sizes()[2]
    for text in arguments:
        if text.partition("=")[2] != str(local_rank):
            raise UserError(f"{shorten(text)}: LOCAL_RANK is {local_rank}: remove the flag, the launcher sets it")


def report_to_torchrun(problem: str) -> None:
    """Write the file from which torchrun prints its summary of a failed rank."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):  # the rank prints the line itself
            # torchrun's own format: it also accepts a text as the message, but prints two lines of warnings then.
            message = {"message": problem, "extraInfo": {"timestamp": str(int(time.time()))}}
            Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def default_threads(ranks: int) -> int:
    """Return the CPU threads of a rank without `--threads`: OMP_NUM_THREADS, otherwise the node's cores / `ranks`.

    Raises:
        UserError: the user's OMP_NUM_THREADS is invalid.
    """
    return requested_threads() or max(1, cores_of_node() // ranks)


def requested_threads() -> int | None:
    """Return the user's OMP_NUM_THREADS; None if it is not set.

    Raises:
        UserError: it is invalid.
    """
    # torchrun (if it starts several processes), accelerate and `join` set it in their own process or in its children.
    # What counts is what the launcher was started with, which these changes do not affect.
    started_by_launcher = {"TORCHELASTIC_RESTART_COUNT", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys()
    text = ""
    with suppress(psutil.Error):  # the launcher has just ended, or belongs to another user
        text = psutil.Process(os.getppid() if started_by_launcher else None).environ().get("OMP_NUM_THREADS", "")
    number = text.partition(",")[0].strip()  # the others are for nested parallel regions
    if not text:
        return None
    if number.isascii() and number.isdecimal() and len(number) <= 9 and 0 < int(number) <= MAX_THREADS:
        return int(number)
    raise UserError(f"OMP_NUM_THREADS={shorten(text)!r}: must be a whole number between 1 and {MAX_THREADS}")


def cores_of_node() -> int:
    """Return the number of CPU cores that the ranks of this node may use together."""
    # torchrun binds each rank to the cores next to its GPU, so torchrun's own cores are counted.
    launcher = os.getppid() if "TORCHELASTIC_RESTART_COUNT" in os.environ else 0
    return len(usable_cores(launcher))


def launcher_id() -> str | None:
    """Return host name, process id and start time of the torchrun that started this rank; None without torchrun.

    They stay the same when torchrun restarts its workers. A run folder records them, so that a restarted job recognizes
    its own folder.
    """
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return None
    parent = psutil.Process(os.getppid())
    # Relative to the boot time: create_time() changes if the system clock is adjusted.
    return f"{socket.gethostname()}:{parent.pid}:{parent.create_time() - psutil.boot_time():.2f}"
