"""Collectives of NCCL: their tensors are checked, their streams simulated, and gloo computes their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from fake_cuda import guard
from fake_cuda.memory import launch
from fake_cuda.process_groups import NCCL_GROUPS, is_nccl
from fake_cuda.report import REPORT, FakeCudaError, where
from fake_cuda.tensor import FakeCuda, data_of, map_tensors, tensors_in, wrap

# By operation of the namespace c10d: the arguments whose tensors it reads, and those whose tensors it writes.
ACCESSES: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "allreduce_": ([0], [0]),
    "allreduce_coalesced_": ([0], [0]),
    "reduce_": ([0], [0]),
    "broadcast_": ([0], [0]),
    "allgather_": ([1], [0]),
    "_allgather_base_": ([1], [0]),
    "allgather_into_tensor_coalesced_": ([1], [0]),
    "gather_": ([1], [0]),
    "scatter_": ([1], [0]),
    "reduce_scatter_": ([1], [0]),
    "_reduce_scatter_base_": ([1], [0]),
    "reduce_scatter_tensor_coalesced_": ([1], [0]),
    "alltoall_": ([1], [0]),
    "alltoall_base_": ([1], [0]),
    "send": ([0], []),
    "recv_": ([], [0]),
}
NOT_IN_NCCL = (torch.int16, torch.uint16, torch.uint32, torch.complex32)
STREAMS: dict[str, int] = {}  # of asynchronous collectives, by group
# C++ holds only a part of a `FakeWork`: Python has to keep it alive until its result has been used.
LATEST_WORKS: deque[FakeWork] = deque(maxlen=256)


class FakeWork(dist.Work):
    """A collective in flight on NCCL's stream. It keeps its tensors alive until a stream waits for it."""

    def __init__(self, stream: int, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.event, self.tensors = guard.event_record(None, stream), tensors
        device = guard.device()
        self.future: Any = torch.futures.Future(devices=[torch.device("cuda", device)])
        before = guard.current_stream(device)
        guard.set_stream(device, stream)  # the future records an event on it
        self.future.set_result(list(outputs))
        guard.set_stream(device, before)

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait. The host does not."""
        guard.event_block(self.event, guard.current_stream())
        self.tensors, self.future = [], None
        return True

    def get_future(self) -> Any:
        future, self.future = self.future, None
        return future

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


def call_collective(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a collective of torch.distributed.

    Raises:
        FakeCudaError: NCCL, or gloo, would refuse a tensor.
    """
    group = _group_of(args)
    tensors = tensors_in(args)
    if not is_nccl(group):
        for tensor in tensors:
            if isinstance(tensor, FakeCuda):
                raise FakeCudaError(f"c10d::{name}: a CUDA tensor in a gloo group, at {where()}")
        return func(*args, **kwargs)
    if name not in ACCESSES:  # barrier
        return func(*args, **kwargs)
    check_nccl(name, tensors)
    REPORT.notes[f"nccl {name} in a group of {group.size()}"] += 1
    inputs, outputs = (_tensors_at(positions, args) for positions in ACCESSES[name])
    result = _run_on_gloo(func, name, args, inputs)

    current = guard.current_stream()
    is_async = _is_async(func, args, kwargs)
    if is_async:
        stream = STREAMS.setdefault(group.group_name, -1)
        if stream < 0:
            stream = STREAMS[group.group_name] = guard.new_stream()
        guard.join(current, stream)
    else:
        stream = current  # PyTorch enqueues NCCL's kernel on the stream of the caller
    launch(f"nccl {name}", [t.cpu_data for t in inputs], [t.cpu_data for t in outputs], stream)
    work = FakeWork(stream, [*inputs, *outputs] if is_async else [], outputs)
    LATEST_WORKS.append(work)
    boxed = work.boxed()
    if isinstance(result, tuple):
        return args[ACCESSES[name][1][0]], boxed
    return boxed


def check_nccl(name: str, tensors: Iterable[torch.Tensor]) -> None:
    """Check the tensors of a collective.

    Raises:
        FakeCudaError: a tensor is on the CPU or on another GPU, has gaps, or has a type that NCCL does not know.
    """
    for tensor in tensors:
        if not isinstance(tensor, FakeCuda):
            problem = "No backend type associated with device type cpu"
        elif tensor.device.index != guard.device():
            problem = f"a tensor on {tensor.device}, but this rank's GPU is cuda:{guard.device()}"
        elif not tensor.is_contiguous():
            problem = "Tensors must be contiguous"
        elif tensor.dtype in NOT_IN_NCCL:
            problem = f"NCCL has no {tensor.dtype}"
        else:
            continue
        raise FakeCudaError(f"c10d::{name}: {problem}, at {where()}")


def _run_on_gloo(func: Any, name: str, args: Any, inputs: Sequence[FakeCuda]) -> Any:
    # gloo can't gather in place.
    copies = {id(t): t.cpu_data.clone() for t in inputs if name == "_allgather_base_"}
    result = func(*map_tensors(lambda t: copies.get(id(t), data_of(t)), args))
    for work in tree_leaves(result):
        if isinstance(work, torch._C.ScriptObject):
            dist.Work.unbox(work).wait()
    return result


def _group_of(args: Any) -> Any:
    """Return the process group among an operation's arguments: the first object of C++."""
    group = next(one for one in args if isinstance(one, torch._C.ScriptObject | dist.ProcessGroup))
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _tensors_at(positions: Sequence[int], args: Any) -> list[FakeCuda]:
    return [one for i in positions for one in tensors_in(args[i]) if isinstance(one, FakeCuda)]


def _is_async(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    for i, argument in enumerate(func._schema.arguments):
        if argument.name in ("asyncOp", "async_op"):
            return bool(args[i] if i < len(args) else kwargs.get(argument.name, True))
    return True


def call_functional_collective(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a functional collective, as DTensor uses them. It runs on the current stream here.

    Raises:
        FakeCudaError: NCCL would refuse a tensor.
    """
    fakes = [one for one in tensors_in(args, kwargs) if isinstance(one, FakeCuda)]
    if not fakes:
        if name != "wait_tensor" and any(isinstance(one, str) and one in NCCL_GROUPS for one in args):
            raise FakeCudaError(f"_c10d_functional::{name}: a CPU tensor in an NCCL group, at {where()}")
        return func(*args, **kwargs)
    if name == "wait_tensor":
        return args[0]
    check_nccl(name, fakes)
    REPORT.notes[f"nccl functional {name}"] += 1
    real_args, real_kwargs = map_tensors(data_of, (args, kwargs))
    result = map_tensors(torch.ops._c10d_functional.wait_tensor.default, func(*real_args, **real_kwargs))
    wrapped = map_tensors(lambda real: wrap(real, fakes[0].device), result)
    launch(name, [f.cpu_data for f in fakes], [data_of(one) for one in tensors_in(wrapped)])
    return wrapped
