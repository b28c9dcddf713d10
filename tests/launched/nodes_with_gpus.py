"""Start an entry point on nodes with simulated GPUs: `nodes_with_gpus.py app.ddp_loop [flags]`.

GPUS lists how many GPUs the node of each rank has. The memory of all GPUs is full, so a process that
starts CUDA fails. The rank UNKNOWN_FLAG_ON gets a flag that no program has.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import NoReturn

import torch

from app.program import Program


def no_context() -> NoReturn:
    raise RuntimeError("CUDA error: out of memory")


if __name__ == "__main__":
    gpus = int(os.environ["GPUS"].split(",")[int(os.environ.get("RANK", "0"))])
    torch.cuda.is_available = lambda: gpus > 0
    torch.cuda.device_count = lambda: gpus
    torch.cuda._lazy_init = no_context
    if os.environ.get("UNKNOWN_FLAG_ON") == os.environ.get("RANK", "0"):
        sys.argv += ["--lerning_rate", "1"]
    Program().launch(import_module(sys.argv.pop(1)).main)
