"""Build and load guard.cpp: devices, streams and events that exist only as vector clocks.

`load` comes before the first import of torch, which asks once whether there is CUDA. So nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import subprocess
from pathlib import Path

HOST = -1  # the host's number among the streams
SOURCE = Path(__file__).with_name("guard.cpp")

# The functions of guard.cpp, where they are explained, and their numbers of arguments. `load` adds them to this module.
FUNCTIONS = {"device": 0, "current_stream": 1, "launch": 1, "ordered": 3, "wait": 1, "wait_event": 1, "wait_all": 0}


def build() -> Path:
    """Compile guard.cpp for this PyTorch in 10 seconds, unless that has been done. Return the library's path."""
    torch = importlib.metadata.distribution("torch").locate_file("torch")
    built_from = f"{importlib.metadata.version('torch')} {torch}\n{SOURCE.read_text()}"  # the path is in the library
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samebits"
    library = cache / f"fake_cuda-{hashlib.sha256(built_from.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    include = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    linked = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
    partial = library.with_suffix(f".{os.getpid()}")  # another process may build it at the same time
    command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", *include, str(SOURCE), "-o", str(partial), *linked]
    subprocess.run(command, check=True)
    partial.replace(library)
    return library


@functools.cache
def load() -> None:
    """Load the library, which registers itself with PyTorch."""
    library = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
    for name, count in FUNCTIONS.items():
        function = getattr(library, f"fake_{name}")
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * count
        globals()[name] = function
