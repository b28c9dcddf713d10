"""The command `samebits`: each program by a short name, and a job of several ranks without torchrun.

    samebits train --csv reviews.csv                   torchrun … -m samebits.ddp_loop
    samebits trainer --nproc_per_node 2                torchrun … -m samebits.trainer_run
    samebits compare runs/ddp_loop/latest runs/trainer_run/latest

Programs with ranks take these flags of torchrun: --nproc_per_node (default: auto, which is one process per GPU, or two
without GPUs), --nnodes, --node_rank, --master_addr, --master_port, --local_addr, --max_restarts and --rdzv_backend,
--rdzv_endpoint, --rdzv_id, --rdzv_conf, and torchrun's environment variables for them, such as PET_NNODES. Unlike
torchrun, it exits with the ranks' status, and a mistake is one line.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from typing import NoReturn

from .common.errors import UserError, shorten
from .common.paths import CLONE, PACKAGE
from .common.terminal import exit_on_interrupt, raise_on_interrupt
from .flags import BENCHMARKS

WITH_RANKS = {"train": "ddp_loop", "trainer": "trainer_run"} | {
    name: name for name in ("minimal", "check", "predict", *BENCHMARKS) if name != "bench.speed"
}
WITHOUT_RANKS = (
    "compare",
    "plan",
    "bench.scaling",
    "bench.growth",
    "bench.speed",
    "experiments.same_bits",
    "experiments.faults",
)
OTHERS = {"download": "data.download"} | {name: name for name in WITHOUT_RANKS}
LARGEST_PORT = 2**16 - 1


def main() -> int:
    name, *arguments = sys.argv[1:] or ["--help"]
    if CLONE is None:  # otherwise, modules in the current folder would replace those of other packages
        os.environ["PYTHONSAFEPATH"] = "1"
    if name in WITH_RANKS and not {"-h", "--help"} & set(arguments):
        exit_on_interrupt()
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
    from .cli import OneLineParser
    from .distributed.processes import resolve_nproc_per_node
    from .early import check_csv, parse

    parser = OneLineParser(add_help=False)
    # A scheduler may set torchrun's flags as variables (Kubeflow does): without them here, each node would train alone.
    variables = {name: value for name, value in os.environ.items() if value}
    nproc_per_node = variables.get("PET_NPROC_PER_NODE", "auto")
    parser.add_argument("--nproc_per_node", default=nproc_per_node)
    types = {"nnodes": nodes, "node_rank": whole_number, "max_restarts": whole_number, "master_port": port}
    types |= {"rdzv_conf": key_values}
    # torchrun checks the others. An endpoint may also be a file, for example.
    for flag in (*types, "master_addr", "local_addr", "rdzv_backend", "rdzv_endpoint", "rdzv_id"):
        default = variables.get(f"PET_{flag.upper()}")
        parser.add_argument(f"--{flag}", type=types.get(flag, nonempty), default=default)
    options, rest = parser.parse_known_args(arguments)
    if int(options.node_rank or 0) >= (most := int((options.nnodes or "1").rpartition(":")[2])):
        raise UserError(f"--node_rank {options.node_rank}: must be less than --nnodes {most}")
    settings, own_flags = parse(module, rest)
    if options.nnodes in (None, "1"):  # another node may have it, and has to learn that this one has not
        check_csv(settings, own_flags)
    exit_on_interrupt()
    with_log_level = "TORCH_CPP_LOG_LEVEL" in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch reads it when it is imported
    from .distributed.agent import run_agent  # after the checks, which need not wait for torch

    if not with_log_level:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # for the ranks
    raise_on_interrupt()
    if module == "predict" and settings.csv is None and own_flags["split"] is None and options.nproc_per_node == "auto":
        options.nproc_per_node = "1"  # for single texts
    ranks = resolve_nproc_per_node(options.nproc_per_node, settings, options.nnodes or "1")
    values = {name: value for name, value in vars(options).items() if value is not None} | {"nproc_per_node": ranks}
    flags = [f"--{name}={value}" for name, value in values.items()]
    if options.nnodes in (None, "1") and set(values) <= {"nproc_per_node", "max_restarts", "nnodes"}:
        flags.insert(0, "--standalone")  # on a free port, so that several jobs can run on this machine
    # Of the signals, torchrun's agent gets none but SIGQUIT: it would end the ranks after 30 s, whatever they still
    # save, and lose their status.
    return run_agent([*flags, "--signals_to_handle=SIGQUIT", "-m", f"{PACKAGE}.{module}", *rest])


# The types of torchrun's flags. torchrun parses the text again, so they return it.


def nonempty(text: str) -> str:
    if not text:
        raise ArgumentTypeError("is empty")
    return text


def whole_number(text: str) -> str:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ArgumentTypeError(f"{shorten(text)}: must be a whole number, 0 or more")
    return text


def port(text: str) -> str:
    if not (re.fullmatch("[0-9]{1,5}", text) and 0 < int(text) <= LARGEST_PORT):
        raise ArgumentTypeError(f"{shorten(text)}: must be a port between 1 and {LARGEST_PORT}")
    return text


def nodes(text: str) -> str:
    """Accept a number of nodes, or the smallest and the largest one as `1:4`."""
    counts = [int(count) for count in text.split(":")] if re.fullmatch("[0-9]{1,6}(:[0-9]{1,6})?", text) else [0]
    if not 0 < counts[0] <= counts[-1]:
        raise ArgumentTypeError(f"{shorten(text)}: must be a number of nodes, 1 or more, or a range such as 1:4")
    return text


def key_values(text: str) -> str:
    if not re.fullmatch("[^=,]+=[^,]+(,[^=,]+=[^,]+)*", text):
        raise ArgumentTypeError(f"{shorten(text)}: must be KEY=VALUE, or several of them between commas")
    return text


if __name__ == "__main__":
    sys.exit(main())
