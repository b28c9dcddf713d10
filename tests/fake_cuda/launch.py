"""Run a program on fake GPUs. torchrun starts this script, and this script starts the program:

    torchrun --nproc_per_node=2 tests/fake_cuda/launch.py --report folder app.ddp_loop --max_steps 3

The program is a module's name or a script's path; its flags follow. Each rank writes its report into the folder.
"""

from __future__ import annotations

import argparse
import atexit
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
    sys.argv = [options.program, *options.flags]
    with fake_gpus():
        if options.report is not None:
            report_at_exit(options.report)
        if is_script:
            runpy.run_path(options.program, run_name="__main__")
        else:
            runpy.run_module(options.program, run_name="__main__", alter_sys=True)


def fake_gpus() -> AbstractContextManager[Any]:
    """Replace torch.cuda in this process, and return the context in which operations are intercepted."""
    from fake_cuda import guard

    guard.load()  # before PyTorch, which asks once whether there is CUDA
    import torch

    from fake_cuda import collectives, cuda_api, patches
    from fake_cuda.operations import OnFakeCuda

    assert not torch.backends.cuda.is_built(), "this build of PyTorch has CUDA: use a real GPU"
    cuda_api.install()
    collectives.install()
    patches.install()
    return OnFakeCuda()


def report_at_exit(folder: Path) -> None:
    """Write the report when the process ends, also by os._exit."""
    from fake_cuda.report import REPORT

    exit_now = os._exit

    def exit_with_report(status: int) -> NoReturn:
        REPORT.write(folder)
        exit_now(status)

    os._exit = exit_with_report
    atexit.register(REPORT.write, folder)


if __name__ == "__main__":
    main()
