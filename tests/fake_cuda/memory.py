"""Check that accesses to memory are ordered by streams, events and waits, even when freed memory is reused."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fake_cuda import guard
from fake_cuda.guard import HOST
from fake_cuda.report import REPORT, where

BLOCK = 512  # bytes; PyTorch's caching allocator rounds sizes up to it
MOST_FREE_BLOCKS = 64  # per stream; the host has waited for all operations on older ones


class Access(NamedTuple):
    """One access to memory: by which stream, at which of the stream's times, and by which operation."""

    stream: int
    time: int
    operation: str


class Memory:
    """A block of device memory, or CPU memory that a copy without waiting uses.

    Attributes:
        stream: on which it was allocated; `HOST` for CPU memory.
        size: in bytes.
        write: the last write.
        reads: the last read of each stream since then.
        recorded: streams that were passed to `Tensor.record_stream`.
    """

    def __init__(self, stream: int, size: int) -> None:
        self.stream, self.size = stream, size
        self.write: Access | None = None
        self.reads: dict[int, Access] = {}
        self.recorded: set[int] = set()

    def accesses(self) -> list[Access]:
        return ([self.write] if self.write else []) + list(self.reads.values())

    def in_use(self) -> bool:
        """Whether a stream may still use it when its own stream uses it next."""
        return not all(_ordered(access, self.stream) for access in self.accesses())

    def access(self, new: Access, is_write: bool) -> None:
        """Record an access. It is a race if it is not ordered after a write, or if it is a write after a read."""
        earlier = self.accesses() if is_write else [self.write] if self.write else []
        for old in earlier:
            if not _ordered(old, new.stream):
                who = "the host" if new.stream == HOST else f"stream {new.stream}"
                REPORT.races[
                    f"{who} {'writes' if is_write else 'reads'} without waiting for stream {old.stream}: "
                    f"{new.operation}; before: {old.operation}; at {where()}"
                ] += 1
        if is_write:
            self.write, self.reads = new, {}
        else:
            self.reads[new.stream] = new


def _ordered(earlier: Access, later: int) -> bool:
    """Return whether an access has finished before the next operation of a stream, or of the host."""
    return earlier.stream == later or guard.ordered(earlier.stream, earlier.time, later)


class Allocator:
    """All memory, and the free blocks of the caching allocator.

    PyTorch's allocator gives freed memory to the next tensor of the same stream, without waiting for other streams that
    still use it. Which block it takes depends on sizes, so this one takes a block that is still in use if there is one.
    """

    def __init__(self) -> None:
        self.on_device: dict[int, Memory] = {}  # by the identity of the storage
        self.on_host: dict[int, Memory] = {}
        self.free: dict[int, list[Memory]] = defaultdict(list)  # by stream
        self.allocated = 0  # bytes

    def memory_of(self, real: torch.Tensor, stream: int) -> Memory:
        """Return the memory of a CPU tensor that stands for a CUDA tensor; allocate it on a stream if it is new."""
        storage = real.untyped_storage()
        key = storage._cdata
        memory = self.on_device.get(key)
        if memory is None:
            memory = Memory(stream, -(-max(storage.nbytes(), 1) // BLOCK) * BLOCK)
            self._take_free_block(memory)
            self.on_device[key] = memory
            self.resize(memory.size)
            # PyTorch keeps the Python object of a storage alive as long as the storage.
            weakref.finalize(storage, self._release, key)
        return memory

    def host_memory_of(self, tensor: torch.Tensor) -> Memory:
        """Return the memory of a CPU tensor that a copy without waiting uses."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.on_host:
            self.on_host[key] = Memory(HOST, storage.nbytes())
            weakref.finalize(storage, self.on_host.pop, key, None)
        return self.on_host[key]

    def resize(self, by: int) -> None:
        """Count bytes that are allocated, or freed if negative."""
        self.allocated += by
        REPORT.peak_bytes = max(REPORT.peak_bytes, self.allocated)

    def _take_free_block(self, memory: Memory) -> None:
        """Take a part of a free block, whose accesses still count."""
        blocks = self.free[memory.stream]
        enough = [block for block in blocks if block.size >= memory.size]
        if not enough:
            return
        block = next((block for block in enough if block.in_use()), None) or min(enough, key=lambda one: one.size)
        memory.write, memory.reads = block.write, dict(block.reads)
        block.size -= memory.size
        if not block.size:
            blocks[:] = [one for one in blocks if one is not block]

    def _release(self, key: int) -> None:
        """Free memory. The allocator waits for streams that `record_stream` has named, but for no others."""
        memory = self.on_device.pop(key)
        self.resize(-memory.size)
        for stream in memory.recorded:
            memory.reads.pop(stream, None)
            if memory.write and memory.write.stream == stream:
                memory.write = None
        blocks = self.free[memory.stream]
        blocks.append(memory)
        del blocks[:-MOST_FREE_BLOCKS]


ALLOCATOR = Allocator()


def launch(
    operation: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], stream: int | None = None
) -> None:
    """Enqueue a kernel.

    Args:
        operation: its name.
        reads: CPU tensors that stand for the CUDA tensors that it reads.
        writes: likewise.
        stream: on which; by default the current one.
    """
    stream = guard.current_stream() if stream is None else stream
    REPORT.kernels += 1
    access = Access(stream, guard.launch(stream), operation)
    for is_write, tensors in ((False, reads), (True, writes)):
        for tensor in tensors:
            if tensor.numel():
                ALLOCATOR.memory_of(tensor, stream).access(access, is_write)


def wait_on_host(reason: str, stream: int | None = None) -> None:
    """Make the host wait for a stream, by default the current one. It counts unless there is nothing to wait for."""
    stream = guard.current_stream() if stream is None else stream
    if guard.busy(stream):
        REPORT.waits[f"{reason} at {where()}"] += 1
    guard.join(stream, HOST)
