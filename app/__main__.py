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
import sys
from collections.abc import Sequence

from .common.paths import CLONE, PACKAGE

WITH_RANKS = {"train": "ddp_loop", "trainer": "trainer_run"} | {
    name: name for name in ("minimal", "check", "predict", "bench.communication", "bench.memory", "bench.traffic")
}
WITHOUT_RANKS = (
    *("compare", "diff", "plan", "bench.scaling", "bench.speed"),
    *("experiments.same_bits", "experiments.faults"),
)
OTHERS = {"download": "data.download"} | {name: name for name in WITHOUT_RANKS}
FLAGS_OF_TORCHRUN = (
    *("nnodes", "node_rank", "master_addr", "master_port", "local_addr", "max_restarts"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
)


def main() -> int:
    name, *arguments = sys.argv[1:] or ["--help"]
    if CLONE is None:  # otherwise, modules in the current folder would replace those of other packages
        os.environ["PYTHONSAFEPATH"] = "1"
    if name in WITH_RANKS and not any(flag.startswith(("-h", "--help")) for flag in arguments):
        from .program import run_program  # imported late: --help needs none of it

        return run_program(lambda: run_ranks(WITH_RANKS[name], arguments))
    if module := (WITH_RANKS | OTHERS).get(name):
        # Become `python -m MODULE`: signals and the exit status are then the program's own.
        os.execv(sys.executable, [sys.executable, "-m", f"{PACKAGE}.{module}", *arguments])
    if name in ("-h", "--help"):
        print((__doc__ or "").replace("samebits.", f"{PACKAGE}."))
        print(f"With ranks: {', '.join(WITH_RANKS)}\nOthers: {', '.join(OTHERS)}\n--help after a name lists its flags.")
        return 0
    print(f"error: no program {name[:60]!r}: use one of {', '.join(WITH_RANKS | OTHERS)}", file=sys.stderr)
    return 2


def run_ranks(module: str, arguments: Sequence[str]) -> int:
    """Run a program under torchrun's agent in this process, and return the status of the rank that ended first.

    torchrun checks the values of its flags, and reads its environment variables (PET_NNODES, …) itself.
    """
    from .cli import OneLineParser, parse_settings
    from .common.errors import UserError
    from .distributed.launcher import resolve_nproc_per_node
    from .program import check_files
    from .settings import Settings

    parser = OneLineParser(add_help=False)
    # An empty variable, as a shell script leaves it, is none.
    parser.add_argument("--nproc_per_node", default=os.environ.get("PET_NPROC_PER_NODE") or "auto")
    for flag in FLAGS_OF_TORCHRUN:
        kind = int if flag in ("node_rank", "master_port", "max_restarts") else str  # others: torchrun, in one line
        parser.add_argument(f"--{flag}", type=kind, default=os.environ.get(f"PET_{flag.upper()}") or None)
    options, rest = parser.parse_known_args(arguments)
    nodes = options.nnodes or "1"
    if module in ("ddp_loop", "trainer_run"):
        settings = parse_settings(rest)
        if nodes == "1":  # another node may have the file, and has to learn that this one has not
            check_files(settings)
    else:  # the ranks report mistakes
        settings = Settings(use_cpu=bool({"--use_cpu", "--use-cpu"} & {*rest}))
    if module == "predict" and options.nproc_per_node == "auto" and not any(f[:5] in ("--csv", "--spl") for f in rest):
        options.nproc_per_node = "1"  # for single texts
    if nodes.isdecimal() and int(nodes) <= int(options.node_rank or 0):
        raise UserError(f"--node_rank {options.node_rank}: must be less than --nnodes {nodes}")
    own_level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = own_level or "FATAL"  # torch reads it when it is imported
    from .distributed.agent import run_agent  # after the checks, which need not wait for torch

    if own_level is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # for the ranks
    ranks = resolve_nproc_per_node(options.nproc_per_node, settings, nodes)
    values = {name: value for name, value in vars(options).items() if value is not None} | {"nproc_per_node": ranks}
    flags = [f"--{name}={value}" for name, value in values.items()]
    if nodes == "1" and values.keys() <= {"nproc_per_node", "max_restarts", "nnodes"}:
        flags.insert(0, "--standalone")  # on a free port, so that several jobs can run on this machine
    # Of the signals, torchrun's agent gets none but SIGQUIT: it would end the ranks after 30 s, whatever they still
    # save, and lose their status.
    return run_agent([*flags, "--signals_to_handle=SIGQUIT", "-m", f"{PACKAGE}.{module}", *rest])


if __name__ == "__main__":
    sys.exit(main())
