"""Start an entry point, such as a training path, on several ranks from another program."""

from __future__ import annotations

from .cli import as_flags
from .distributed.environment import default_threads
from .distributed.launcher import TorchrunJob, torchrun_command
from .settings import Settings

BLOCKS = "SAMEBITS_BLOCKS"  # set for runs that are compared: they print only the block at the start, or "none"
PATHS = ("ddp_loop", "trainer_run")


def flags_of(settings: Settings) -> list[str]:
    """Return the command line that parses into these settings, whatever the default model of the entry point is."""
    model = f"--model={settings.model}"
    return [*(flag for flag in as_flags(settings) if flag != model), model]


def run_job(module: str, settings: Settings, nproc_per_node: int, **environment: str) -> int:
    """Run an entry point under torchrun, which prints to this process's output, and return its exit status."""
    # If it is unset, torchrun prints a warning. The ranks would choose the same number themselves.
    threads = settings.threads or default_threads(settings.logical_ranks or nproc_per_node)
    command = torchrun_command(module, flags_of(settings), nproc_per_node=nproc_per_node)
    with TorchrunJob(command, environment={"OMP_NUM_THREADS": str(threads)} | environment) as job:
        return job.torchrun.wait()
