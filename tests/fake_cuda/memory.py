"""Check that accesses to memory are ordered by streams, events and waits, even when freed memory is reused."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from fake_cuda import guard
from fake_cuda.guard import HOST
from fake_cuda.report import REPORT, where


class Access(NamedTuple):
    """One access to memory: by which stream, at which of the stream's times, and by which operation."""

    stream: int
    time: int
    operation: str

    def is_over(self, stream: int) -> bool:
        """Whether it has finished before the next operation of a stream, or of the host."""
        return bool(guard.ordered(self.stream, self.time, stream))


class Memory:
    """The memory of a tensor on a device, or CPU memory that a copy without waiting uses.

    Attributes:
        stream: on which it was allocated; `HOST` for CPU memory.
        write: the last write.
        reads: the last read of each stream since then.
        recorded: streams that were passed to `Tensor.record_stream`.
    """

    def __init__(self, stream: int, earlier: Iterable[Access] = ()) -> None:
        self.stream, self.recorded = stream, set[int]()
        self.write: Access | None = None
        self.reads = {access.stream: access for access in earlier}

    def accesses(self) -> list[Access]:
        return ([self.write] if self.write else []) + list(self.reads.values())

    def access(self, new: Access, is_write: bool) -> None:
        """Record an access. It is a race if it is not ordered after a write, or if it is a write after a read."""
        earlier = self.accesses() if is_write else [self.write] if self.write else []
        for old in earlier:
            if not old.is_over(new.stream):
                who = "the host" if new.stream == HOST else f"stream {new.stream}"
                REPORT.races[
                    f"{who} {'writes' if is_write else 'reads'} without waiting for stream {old.stream}: "
                    f"{new.operation}; before: {old.operation}; at {where()}"
                ] += 1
        if is_write:
            self.write, self.reads = new, {}
        else:
            self.reads[new.stream] = new


ON_DEVICE: dict[int, Memory] = {}  # by the identity of the storage
ON_HOST: dict[int, Memory] = {}
# PyTorch's allocator gives freed memory to the next tensors of its stream, without waiting for other streams that still
# use it. Which tensor gets it depends on sizes; here it is the next one. By stream, the accesses to freed memory:
FREED: dict[int, list[Access]] = defaultdict(list)


def memory_of(real: torch.Tensor, stream: int) -> Memory:
    """Return the memory of a CPU tensor that stands for a CUDA tensor; allocate it on a stream if it is new."""
    storage = real.untyped_storage()
    key = storage._cdata
    if key not in ON_DEVICE:
        ON_DEVICE[key] = Memory(stream, sorted(FREED.pop(stream, ())))
        # PyTorch keeps the Python object of a storage alive as long as the storage.
        weakref.finalize(storage, _free, key)
    return ON_DEVICE[key]


def _free(key: int) -> None:
    """Free memory. The allocator waits for streams that `record_stream` has named, but for no others."""
    memory = ON_DEVICE.pop(key)
    accesses = [access for access in memory.accesses() if access.stream not in memory.recorded]
    if unfinished := [access for access in accesses if not access.is_over(memory.stream)]:
        FREED[memory.stream] += unfinished


def host_memory_of(tensor: torch.Tensor) -> Memory:
    """Return the memory of a CPU tensor that a copy without waiting uses."""
    storage = tensor.untyped_storage()
    key = storage._cdata
    if key not in ON_HOST:
        ON_HOST[key] = Memory(HOST)
        weakref.finalize(storage, ON_HOST.pop, key, None)
    return ON_HOST[key]


def access_on_host(tensor: torch.Tensor, operation: str, is_write: bool = False) -> None:
    """Record that the host uses a CPU tensor, for which it may have to wait before."""
    memory = ON_HOST.get(tensor.untyped_storage()._cdata) if ON_HOST else None
    if memory is not None:
        memory.access(Access(HOST, guard.launch(HOST), operation), is_write)


def launch(
    operation: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], stream: int | None = None
) -> None:
    """Enqueue a kernel on a stream, by default the current one. `reads` and `writes` are of `FakeCuda.cpu_data`."""
    stream = guard.current_stream(guard.device()) if stream is None else stream
    REPORT.kernels += 1
    access = Access(stream, guard.launch(stream), operation)
    for is_write, tensors in ((False, reads), (True, writes)):
        for tensor in tensors:
            if tensor.numel():
                memory_of(tensor, stream).access(access, is_write)


def launch_and_wait(operation: str, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()) -> None:
    """Enqueue a kernel for which the host waits. It counts unless everything before has been waited for."""
    stream = guard.current_stream(guard.device())
    REPORT.count_wait(operation, guard.wait(stream))
    launch(operation, reads, writes)
    guard.wait(stream)
