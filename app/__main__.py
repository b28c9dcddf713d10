"""The command `samebits`: each program by a short name, and a job of several ranks without torchrun.

    samebits train --csv reviews.csv                   torchrun … -m samebits.ddp_loop
    samebits trainer --nproc_per_node 2                torchrun … -m samebits.trainer_run
    samebits compare runs/ddp_loop/latest runs/trainer_run/latest

Programs with ranks take these flags of torchrun: --nproc_per_node (default: auto, which is one process per GPU, or two
without GPUs), --nnodes, --node_rank, --master_addr, --master_port, --local_addr, --max_restarts and --rdzv_backend,
--rdzv_endpoint, --rdzv_id, --rdzv_conf. Unlike torchrun, it exits with the ranks' status, and a mistake is one line.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from .common.paths import CLONE, PACKAGE

BENCHMARKS = ("bench.speed", "bench.traffic", "bench.memory", "bench.checkpoint_cost", "bench.communication")
WITH_RANKS = {"train": "ddp_loop", "trainer": "trainer_run"} | {name: name for name in ("minimal", *BENCHMARKS)}
WITHOUT_RANKS = ("compare", "plan", "bench.scaling", "experiments.same_bits", "experiments.fault_injection")
OTHERS = {"download": "data.download"} | {name: name for name in WITHOUT_RANKS}
TORCHRUN_FLAGS = (
    *("nnodes", "node_rank", "master_addr", "master_port", "local_addr", "max_restarts"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
)
RANK_STATUSES = (1, 2, 75, 130)  # see program.launch


class JobEnded(BaseException):
    """The ranks have ended after a signal. Raised in the handler, so that torchrun does not restart them."""


def main() -> int:
    name, *arguments = sys.argv[1:] or ["--help"]
    if CLONE is None:  # otherwise, modules in the current folder would replace those of other packages
        os.environ["PYTHONSAFEPATH"] = "1"
    if name in WITH_RANKS and not {"-h", "--help"} & set(arguments):
        from .program import run_program  # imported late: --help needs none of it

        return run_program(lambda: run_ranks(WITH_RANKS[name], arguments))
    if module := (WITH_RANKS | OTHERS).get(name):
        replace_process(module, arguments)
    if name in ("-h", "--help"):
        print((__doc__ or "").replace("samebits.", f"{PACKAGE}."))
        print(f"With ranks: {', '.join(WITH_RANKS)}\nOthers: {', '.join(OTHERS)}\n--help after a name lists its flags.")
        return 0
    print(f"error: no program {name[:60]!r}: use one of {', '.join(WITH_RANKS | OTHERS)}", file=sys.stderr)
    return 2


def replace_process(module: str, arguments: Sequence[str]) -> NoReturn:
    """Become `python -m MODULE`: signals and the exit status are then the program's own."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"{PACKAGE}.{module}", *arguments])


def run_ranks(module: str, arguments: Sequence[str]) -> int:
    """Run a program under torchrun's agent in this process, and return the status of the rank that ended first."""
    from .cli import OneLineParser, parse_settings
    from .distributed.processes import resolve_nproc_per_node
    from .settings import Settings

    parser = OneLineParser(add_help=False)
    parser.add_argument("--nproc_per_node", "--nproc-per-node", default="auto")
    for flag in TORCHRUN_FLAGS:
        parser.add_argument(f"--{flag}", f"--{flag.replace('_', '-')}")
    options, rest = parser.parse_known_args(arguments)
    is_path = module in ("ddp_loop", "trainer_run")
    settings = parse_settings(arguments=rest) if is_path else Settings(use_cpu="--use_cpu" in rest)
    ranks = resolve_nproc_per_node(options.nproc_per_node, settings, options.nnodes or "1")
    values = {name: value for name, value in vars(options).items() if value is not None} | {"nproc_per_node": ranks}
    flags = [f"--{name}={value}" for name, value in values.items()]
    if set(values) <= {"nproc_per_node", "max_restarts"}:
        flags.insert(0, "--standalone")
    # Of the signals, torchrun's agent gets none but SIGQUIT: it would end the ranks after 30 s, whatever they still
    # save, and lose their status.
    return run_agent([*flags, "--signals_to_handle=SIGQUIT", "-m", f"{PACKAGE}.{module}", *rest])


def run_agent(command: list[str]) -> int:
    """Run torchrun's agent with this command line, without its own output. Return the ranks' exit status."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    for name in [] if "LOGLEVEL" in os.environ else list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed."):  # each of torchrun's loggers has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, forward)
    try:
        run(parse_args(command))
    except ChildFailedError as failure:
        status = failure.get_first_failure()[1].exitcode
        return status if status in RANK_STATUSES else 1
    except JobEnded as ended:
        return int(ended.args[0])
    return 0


def forward(number: int, _: FrameType | None) -> NoReturn:
    """Handle a signal: pass it on to the ranks, which save a checkpoint, wait for them, and end the job."""
    import psutil

    if number == signal.SIGHUP:  # no stop request of a rank
        number = signal.SIGTERM
    ranks = [process for process in psutil.Process().children() if "-m" in process.cmdline()]
    for process in ranks:
        process.send_signal(number)
    statuses = [process.wait() for process in ranks]
    if all(status == 0 for status in statuses) and ranks:
        raise JobEnded(0)  # the signal came after the last step
    known = [status for status in statuses if status in RANK_STATUSES]
    raise JobEnded(max(known, default=130))


if __name__ == "__main__":
    sys.exit(main())
