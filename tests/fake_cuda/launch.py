"""Run a program on fake GPUs. torchrun starts this script, and this script starts the program:

    torchrun --nproc_per_node=2 tests/fake_cuda/launch.py app.ddp_loop --max_steps 3
    RANKS_PER_NODE=2 torchrun --nproc_per_node=4 tests/fake_cuda/launch.py --report folder app.ddp_loop --max_steps 3

The program is a module's name or a script's path; its flags follow. Rank 0 prints the report, or, with --report, each
rank writes one into a folder. With RANKS_PER_NODE, the ranks are divided among several simulated machines.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import runpy
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

TESTS = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="folder for report-<rank>.json")
    parser.add_argument("program", help="a module's name, or the path of a script, which ends in .py")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    is_script = options.program.endswith(".py")
    # The first entry is the folder of this file.
    sys.path[:1] = [str(TESTS), str(Path(options.program).resolve().parent if is_script else Path.cwd())]
    from helpers.nodes import divide_among_nodes

    if "RANK" in os.environ:  # otherwise the program forks its ranks
        divide_among_nodes()
    sys.argv = [options.program, *options.flags]
    with fake_gpus(options.report):
        if is_script:
            runpy.run_path(options.program, run_name="__main__")
        else:
            runpy.run_module(options.program, run_name="__main__", alter_sys=True)


def fake_gpus(report: Path | None) -> AbstractContextManager[Any]:
    """Replace torch.cuda in this process, and return the context in which operations are intercepted."""
    from fake_cuda import guard

    guard.load()  # before PyTorch, which asks once whether there is CUDA
    import torch

    from fake_cuda import cuda_api, patches, process_groups
    from fake_cuda.operations import OnFakeCuda

    assert not torch.backends.cuda.is_built(), "this build of PyTorch has CUDA: use a real GPU"
    names = ("RANKS_PER_NODE", "FORKED_RANKS", "LOCAL_WORLD_SIZE")
    ranks = next((int(os.environ[name]) for name in names if name in os.environ), 1)
    cuda_api.install(devices=max(ranks, 2))  # at least two GPUs, so that a tensor can be on the wrong one
    process_groups.install()
    patches.install()
    report_at_exit(report)
    return OnFakeCuda()


def report_at_exit(folder: Path | None) -> None:
    """Print or write the report when the process ends, also by os._exit."""
    from fake_cuda.report import REPORT

    def report() -> None:
        rank = int(os.environ.get("RANK", 0))
        if folder is not None:
            REPORT.write(folder, rank)
        elif rank == 0:
            print(json.dumps(REPORT.as_dict(), indent=1), file=sys.stderr, flush=True)

    exit_now = os._exit

    def exit_with_report(status: int) -> NoReturn:
        report()
        exit_now(status)

    os._exit = exit_with_report
    atexit.register(report)


if __name__ == "__main__":
    main()
