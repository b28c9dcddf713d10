"""What fake GPUs need from the machine."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch
from helpers.jobs import PROJECT, unavailable

from fake_cuda import guard


def require_fake_gpus() -> None:
    """Skip a test on fake GPUs (see `tests/fake_cuda/README.md`) where there can't be any."""
    if torch.backends.cuda.is_built():
        pytest.skip("this build of PyTorch has CUDA: the tests marked gpu run on real GPUs")
    if sys.platform != "linux":
        pytest.skip("fake GPUs are built on Linux only")
    if f"torch=={torch.__version__.partition('+')[0]}" not in (PROJECT / "constraints.txt").read_text().split():
        pytest.skip("fake GPUs depend on internals of PyTorch: they are made for the version in constraints.txt")
    if shutil.which("g++") is None:
        unavailable("no g++, which builds tests/fake_cuda/guard.cpp: apt-get install g++")
    guard.build()
