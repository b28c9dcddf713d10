"""NCCL's process groups and collectives: tensors are checked, streams simulated, and gloo computes the results."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

from fake_cuda import guard
from fake_cuda.cuda_api import Event, Stream, current_stream
from fake_cuda.memory import launch
from fake_cuda.report import REPORT, FakeCudaError, where
from fake_cuda.tensor import FakeCuda, data_of, map_tensors, tensors_in, wrap

# Operations of c10d that read and write their first argument. The others write it and read the second one.
IN_PLACE = {"allreduce_", "allreduce_coalesced_", "reduce_", "broadcast_"}
NOT_IN_NCCL = (torch.int16, torch.uint16, torch.uint32, torch.complex32)
STREAMS: dict[Any, Stream] = defaultdict(Stream)  # of asynchronous collectives, by group
# C++ holds only a part of a `FakeWork`: Python has to keep it alive until its result has been used.
LATEST_WORKS: deque[FakeWork] = deque(maxlen=256)


def install() -> None:
    """Let gloo run the groups that are created with NCCL. PyTorch reports NCCL as their backend."""
    create = distributed_c10d._new_process_group_helper

    def create_group(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **options: Any) -> Any:
        if backend != "nccl":
            return create(size, rank, ranks, backend, *args, **options)
        device, current = options.pop("device_id", None), torch.device("cuda", guard.device())
        if device != current and not ranks:  # all ranks: it is the first group
            raise FakeCudaError(f"init_process_group: device_id={device}, but the current device is {current}")
        group, store = create(size, rank, ranks, "gloo", *args, **options)
        if isinstance(group, dist.ProcessGroup):  # otherwise this rank is not in it
            distributed_c10d._world.pg_map[group] = (backend, store)
        return group, store

    distributed_c10d._new_process_group_helper = create_group


class FakeWork(dist.Work):
    """A collective in flight on NCCL's stream. It keeps its tensors alive until a stream waits for it."""

    def __init__(self, stream: Stream, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.event, self.tensors = Event(), tensors
        self.event.record(stream)
        self.future: Any = torch.futures.Future(devices=[stream.device])
        with torch.cuda.stream(stream):  # the future records an event on it
            self.future.set_result(list(outputs))

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait. The host does not."""
        current_stream().wait_event(self.event)
        self.tensors, self.future = [], None
        return True

    def get_future(self) -> Any:
        future, self.future = self.future, None
        return future


def call_collective(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a collective of torch.distributed.

    Raises:
        FakeCudaError: NCCL, or gloo, would refuse a tensor.
    """
    group = dist.ProcessGroup.unbox(next(one for one in args if isinstance(one, torch._C.ScriptObject)))
    tensors = tensors_in(args)
    if dist.get_backend(group) != "nccl":
        if any(isinstance(tensor, FakeCuda) for tensor in tensors):
            raise FakeCudaError(f"c10d::{name}: a CUDA tensor in a gloo group, at {where()}")
        return func(*args, **kwargs)
    if name == "barrier":
        return func(*args, **kwargs)
    check_nccl(name, tensors)
    REPORT.notes[f"nccl {name} in a group of {group.size()}"] += 1
    inputs, outputs = tensors_in(args[0 if name in IN_PLACE else 1]), tensors_in(args[0])
    result = _run_on_gloo(func, name, args, kwargs, inputs)

    stream = current_stream()
    arguments = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    is_async = arguments.get("asyncOp", arguments.get("async_op", True))
    if is_async:  # otherwise PyTorch enqueues NCCL's kernel on the stream of the caller
        stream = STREAMS[group.group_name]
        stream.wait_stream(current_stream())
    launch(f"nccl {name}", [data_of(t) for t in inputs], [data_of(t) for t in outputs], stream.stream_id)
    work = FakeWork(stream, [*inputs, *outputs] if is_async else [], outputs)
    LATEST_WORKS.append(work)
    return (args[0], work.boxed()) if isinstance(result, tuple) else work.boxed()


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


def _run_on_gloo(func: Any, name: str, args: Any, kwargs: dict[str, Any], inputs: Sequence[torch.Tensor]) -> Any:
    # gloo can't gather in place.
    copies = {id(one): data_of(one).clone() for one in inputs if name == "_allgather_base_"}
    result = func(*map_tensors(lambda one: copies.get(id(one), data_of(one)), args), **kwargs)
    for work in tree_leaves(result):
        if isinstance(work, torch._C.ScriptObject):
            dist.Work.unbox(work).wait()
    return result


def call_functional_collective(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a functional collective, as DTensor uses them. It runs on the current stream here.

    Raises:
        FakeCudaError: NCCL would refuse a tensor.
    """
    tensors = tensors_in(args, kwargs)
    is_on_gpu = any(isinstance(one, FakeCuda) for one in tensors)
    if name == "wait_tensor" and is_on_gpu:
        return args[0]
    nccl = {group.group_name for group, (backend, _) in distributed_c10d._world.pg_map.items() if backend == "nccl"}
    if not is_on_gpu and nccl.isdisjoint(one for one in args if isinstance(one, str)):
        return func(*args, **kwargs)
    check_nccl(name, tensors)
    REPORT.notes[f"nccl functional {name}"] += 1
    real_args, real_kwargs = map_tensors(data_of, (args, kwargs))
    result = map_tensors(torch.ops._c10d_functional.wait_tensor.default, func(*real_args, **real_kwargs))
    wrapped = map_tensors(lambda real: wrap(real, tensors[0].device), result)
    launch(name, [data_of(one) for one in tensors], [data_of(one) for one in tensors_in(wrapped)])
    return wrapped
