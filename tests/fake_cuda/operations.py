"""Run every operation of PyTorch on the CPU, after checking that a GPU would accept it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fake_cuda import guard, random_numbers
from fake_cuda.collectives import call_collective, call_functional_collective
from fake_cuda.copies import copy_tensors
from fake_cuda.guard import HOST
from fake_cuda.memory import ALLOCATOR, Access, launch, wait_on_host
from fake_cuda.report import REPORT, FakeCudaError, where
from fake_cuda.tensor import FakeCuda, data_of, map_tensors, resolve, tensors_in, wrap

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeCuda)
# Operations that accept CUDA tensors together with CPU tensors of more than one element.
MIXED = {"copy_", "copy", "_to_copy", "_foreach_copy_", "index", "index_put", "index_put_", "_index_put_impl_"}
# Operations that accept CPU scalars, apart from those that PyTorch tags as pointwise.
WITH_SCALARS = {"fill_", "masked_fill", "masked_fill_", "where"}
# The shape of the result depends on numbers, so the host waits for them.
WAITING = {
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "equal",
    "is_nonzero",
    "bincount",
}
COPIES = {"_to_copy", "copy_", "_foreach_copy_"}
NOT_SIMULATED = {"set_", "resize_"}


class OnFakeCuda(TorchDispatchMode):
    """Intercept all operations, including those that create tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fake_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if fake_mode is not None or FakeTensor in types:  # DTensor computes shapes with PyTorch's own fake tensors
            return func(*args, **(kwargs or {}))
        if not all(one in PLAIN for one in types):
            return NotImplemented  # such as DTensor, which calls operations on its local tensors
        return execute(func, args, kwargs or {})


class Effects(NamedTuple):
    """The effect of an operation on its arguments."""

    positions: frozenset[int]  # arguments that it writes
    names: frozenset[str]  # keyword arguments that it writes
    is_view: bool  # whether it only returns views of an argument


@functools.cache
def effects_of(func: Any) -> Effects:
    """Return the effect of an operation on its arguments, according to its schema."""
    written = [(i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write]
    returns = func._schema.returns
    is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    if func._schema.name == "fsdp::all_gather_copy_in":  # returns its second argument, into which it copies
        return Effects(frozenset({1}), frozenset(), False)
    return Effects(frozenset(i for i, _ in written), frozenset(name for _, name in written), is_view)


def execute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation.

    Raises:
        FakeCudaError: a GPU would refuse it.
    """
    namespace, name = func._schema.name.split("::")
    if namespace == "c10d":
        return call_collective(func, name, args, kwargs)
    if namespace == "_c10d_functional":
        return call_functional_collective(func, name, args, kwargs)
    tensors = tensors_in(args, kwargs)
    fakes = [one for one in tensors if isinstance(one, FakeCuda)]
    target = resolve(kwargs["device"]) if kwargs.get("device") is not None else None
    if not fakes and (target is None or target.type != "cuda"):
        check_host_accesses(func, name, args)
        return func(*args, **kwargs)
    if name == "_local_scalar_dense":
        return read_scalar(args[0])
    if name in COPIES:
        return copy_tensors(name, args, kwargs, target)
    if name == "is_pinned":
        return False
    if name == "record_stream":
        return None  # FakeCuda.record_stream has been called by what needs it
    if name in NOT_SIMULATED:
        raise NotImplementedError(f"{func}: not simulated")
    if fakes and target is not None and target.type != "cuda" and name not in MIXED:
        real_args, real_kwargs = on_cpu(args, kwargs)  # such as empty_like(device="cpu")
        return func(*real_args, **real_kwargs)

    device = check_devices(func, name, tensors, target)
    if kwargs.get("pin_memory"):
        raise FakeCudaError(f"{func}: only CPU tensors can be pinned, at {where()}")
    result = run_on_cpu(func, name, args, kwargs, fakes)
    by_data = {id(one.cpu_data): one for one in fakes}  # operations in place return an argument
    wrapped = map_tensors(lambda real: by_data[id(real)] if id(real) in by_data else wrap(real, device), result)
    record_accesses(func, name, args, kwargs, wrapped)
    if name in WAITING or (name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])):
        wait_on_host(name)
    return wrapped


def read_scalar(tensor: FakeCuda) -> Any:
    """Read a number on the host, as `.item()`, `float(tensor)` and `if tensor:` do."""
    wait_on_host("item()")
    launch("item", [tensor.cpu_data], [])
    guard.join(guard.current_stream(), HOST)
    return tensor.cpu_data.item()


def check_devices(func: Any, name: str, tensors: Iterable[torch.Tensor], target: torch.device | None) -> torch.device:
    """Check that all tensors of an operation are on one device, and return it.

    Raises:
        FakeCudaError: they are not. CPU scalars are allowed where CUDA's kernels accept them.
    """
    device = next((one.device for one in tensors if isinstance(one, FakeCuda)), target)
    assert device is not None
    for one in tensors:
        if one.device == device or (not isinstance(one, FakeCuda) and name in MIXED):
            continue
        is_scalar = not isinstance(one, FakeCuda) and one.dim() == 0
        accepts_scalars = torch.Tag.pointwise in func.tags or name in WITH_SCALARS
        if not (is_scalar and accepts_scalars) or "_foreach" in name or "_fused" in name:
            raise FakeCudaError(
                f"{func}: Expected all tensors to be on the same device, but found {device} and "
                f"{one.device} {tuple(one.shape)}, at {where()}"
            )
        REPORT.notes[f"{func}: a CPU scalar with CUDA tensors at {where()}"] += 1
    if device.index != guard.device():
        REPORT.notes[f"{func}: on {device}, but the current device is {guard.device()} at {where()}"] += 1
    return device


def on_cpu(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return an operation's arguments with the CPU tensors that stand for CUDA tensors."""
    real_args, real_kwargs = map_tensors(data_of, (args, kwargs))
    return real_args, real_kwargs | ({"device": torch.device("cpu")} if "device" in kwargs else {})


def run_on_cpu(func: Any, name: str, args: Any, kwargs: dict[str, Any], fakes: Iterable[FakeCuda]) -> Any:
    """Compute an operation's result with the CPU's kernel."""
    real_args, real_kwargs = on_cpu(args, kwargs)
    shapes = [(one.cpu_data, one.cpu_data.shape) for one in fakes]
    if name in ("_fused_adamw_", "_fused_adam_"):
        result = None
        run_without_tails(func, real_args, real_kwargs)
    elif torch.Tag.nondeterministic_seeded in func.tags:
        with random_numbers.of_device():
            result = func(*real_args, **real_kwargs)
    else:
        result = func(*real_args, **real_kwargs)
    if any(real.shape != shape for real, shape in shapes):
        raise NotImplementedError(f"{func} has resized an argument: not simulated")
    return result


def run_without_tails(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Run a fused optimizer so that an element's result does not depend on its place in the tensor, as on GPUs.

    The CPU's kernel computes the last elements, which don't fill a vector, differently.
    """
    lists = [list(tensors) for tensors in args[:4]]
    padded = [[torch.nn.functional.pad(t.reshape(-1), (0, -t.numel() % 64)) for t in one] for one in lists]
    func(*padded, *args[4:], **kwargs)
    for tensors, results in zip(lists, padded, strict=True):
        for tensor, result in zip(tensors, results, strict=True):
            tensor.copy_(result[: tensor.numel()].view(tensor.shape))


def record_accesses(func: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
    """Record the memory that an operation's kernel reads and writes."""
    effects = effects_of(func)
    if effects.is_view or name.startswith(("empty", "new_empty")):
        return
    written = [args[i] for i in effects.positions if i < len(args)]
    written += [value for key, value in kwargs.items() if key in effects.names]
    writes = {id(one.cpu_data): one.cpu_data for one in tensors_in(written, result) if isinstance(one, FakeCuda)}
    only_shapes = name.startswith("new_") or name.endswith("_like")
    arguments = [] if only_shapes else tensors_in(args, kwargs)
    reads = [one.cpu_data for one in arguments if isinstance(one, FakeCuda) and id(one.cpu_data) not in writes]
    launch(name, reads, list(writes.values()))


def check_host_accesses(func: Any, name: str, args: Any) -> None:
    """Check that the host waits before it uses CPU memory that a copy without waiting reads or writes."""
    if not ALLOCATOR.on_host:
        return
    effects = effects_of(func)
    if effects.is_view:
        return
    for i, argument in enumerate(args):
        for tensor in tensors_in(argument):
            check_host_access(tensor, name, is_write=i in effects.positions)


def check_host_access(tensor: torch.Tensor, name: str, is_write: bool = False) -> None:
    """Check it for one tensor."""
    memory = ALLOCATOR.on_host.get(tensor.untyped_storage()._cdata)
    if memory is not None:
        memory.access(Access(HOST, guard.launch(HOST), name), is_write)
