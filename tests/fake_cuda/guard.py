"""Build, load and call guard.cpp: devices, streams and events that exist only as vector clocks.

`load` comes before the first import of torch, which asks once whether there is CUDA. So nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
from pathlib import Path

HOST = -1  # the host's number among the streams
SOURCE = Path(__file__).with_name("guard.cpp")


def library_path() -> Path:
    """Return where the built library is kept: it depends on the version of PyTorch and on the source."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samebits"
    source = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    return cache / f"fake_cuda-{importlib.metadata.version('torch')}-{source}.so"


def build() -> Path:
    """Compile guard.cpp, which takes 10 seconds, unless that has been done. Return the library's path."""
    library = library_path()
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    include = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    linked = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
    partial = library.with_suffix(f".{os.getpid()}")  # another process may build it at the same time
    command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", *include, str(SOURCE), "-o", str(partial), *linked]
    subprocess.run(command, check=True)
    partial.replace(library)
    return library


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library, which registers itself with PyTorch."""
    library = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
    stream, event, number = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    for name, result, arguments in [
        ("new_stream", stream, []),
        ("stream_count", stream, []),
        ("current_stream", stream, [number]),
        ("set_stream", None, [number, stream]),
        ("device", number, []),
        ("set_device", None, [number]),
        ("set_device_count", None, [number]),
        ("launch", ctypes.c_uint64, [stream]),
        ("ordered", number, [stream, ctypes.c_uint64, stream]),
        ("busy", number, [stream]),
        ("join", None, [stream, stream]),
        ("event_record", event, [event, stream]),
        ("event_block", None, [event, stream]),
        ("event_busy", number, [event]),
    ]:
        function = getattr(library, f"fake_{name}")
        function.restype, function.argtypes = result, arguments
    return library


# ---- devices --------------------------------------------------------------------------------------------------------


def device() -> int:
    """Return the current device of this thread."""
    return int(load().fake_device())


def set_device(index: int) -> None:
    """Change the current device of this thread."""
    load().fake_set_device(index)


def set_device_count(count: int) -> None:
    """Set how many GPUs there are."""
    load().fake_set_device_count(count)


# ---- streams --------------------------------------------------------------------------------------------------------


def new_stream() -> int:
    """Create a stream, and return its number."""
    return int(load().fake_new_stream())


def stream_count() -> int:
    """Return how many streams there are."""
    return int(load().fake_stream_count())


def current_stream(index: int | None = None) -> int:
    """Return the current stream of a device, by default of the current one, in this thread."""
    return int(load().fake_current_stream(device() if index is None else index))


def set_stream(index: int, stream: int) -> None:
    """Change the current stream of a device in this thread."""
    load().fake_set_stream(index, stream)


def launch(stream: int) -> int:
    """Enqueue an operation on a stream. Return its time: its number among the stream's operations."""
    return int(load().fake_launch(stream))


def ordered(earlier: int, time: int, later: int) -> bool:
    """Return whether an operation has finished before the next operation of a stream, or of the host.

    Args:
        earlier: the operation's stream.
        time: the operation's time on it.
        later: the other stream.
    """
    return bool(load().fake_ordered(earlier, time, later))


def busy(stream: int) -> bool:
    """Whether a stream may have work to do that the host has not waited for."""
    return bool(load().fake_busy(stream))


def join(earlier: int, later: int) -> None:
    """Make a stream, or the host, wait for all operations that another stream has so far."""
    load().fake_join(earlier, later)


# ---- events ---------------------------------------------------------------------------------------------------------


def event_record(event: int | None, stream: int) -> int:
    """Record an event, a new one for None, on a stream. Return the event."""
    return int(load().fake_event_record(event, stream))


def event_block(event: int | None, stream: int) -> None:
    """Make a stream, or the host, wait for an event."""
    load().fake_event_block(event, stream)


def event_busy(event: int | None) -> bool:
    """Whether the host has not waited for an event yet."""
    return bool(load().fake_event_busy(event))
