"""Run every operation of PyTorch on the CPU, after checking that a GPU would accept it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fake_cuda import guard
from fake_cuda.collectives import call_collective, call_functional_collective
from fake_cuda.cuda_api import random_numbers_of_device
from fake_cuda.memory import Access, access_on_host, host_memory_of, launch, launch_and_wait
from fake_cuda.report import FakeCudaError, where
from fake_cuda.tensor import FakeCuda, data_of, map_tensors, resolve, tensors_in, wrap

aten = torch.ops.aten
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeCuda)
COPIES = {"_to_copy", "copy_", "_foreach_copy_"}
# Operations that accept CUDA tensors together with CPU tensors of more than one element.
MIXED = {"copy", "index", "index_put", "index_put_", "_index_put_impl_"}
# Operations that accept CPU scalars, apart from those that PyTorch tags as pointwise.
WITH_SCALARS = {"fill_", "masked_fill", "masked_fill_", "where"}
# The shape of the result depends on numbers, so the host waits for them.
WAITING = {"nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim"}
WAITING |= {"equal", "is_nonzero", "bincount"}


class OnFakeCuda(TorchDispatchMode):
    """Intercept all operations, including those that create tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fake_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if fake_mode is not None or FakeTensor in types:  # DTensor computes shapes with PyTorch's own fake tensors
            return func(*args, **(kwargs or {}))
        if not all(one in PLAIN for one in types):
            return NotImplemented  # such as DTensor, which calls operations on its local tensors
        return execute(func, args, kwargs or {})


@functools.cache
def effects_of(func: Any) -> tuple[frozenset[int | str], bool]:
    """Return which arguments an operation writes, by position and by name, and whether it only returns views of one."""
    if func._schema.name == "fsdp::all_gather_copy_in":  # returns its second argument, into which it copies
        return frozenset({1}), False
    arguments = [(i, a) for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write]
    returns = func._schema.returns
    is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return frozenset(key for i, a in arguments for key in (i, a.name)), is_view


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
    is_on_gpu = target is not None and target.type == "cuda"
    if not fakes and not is_on_gpu:
        written, is_view = effects_of(func)
        for i, argument in enumerate(() if is_view else args):
            for tensor in tensors_in(argument):
                access_on_host(tensor, name, is_write=i in written)
        return func(*args, **kwargs)
    if name == "_local_scalar_dense":  # `.item()`, `float(tensor)` and `if tensor:`
        launch_and_wait("item()", [args[0].cpu_data])
        return args[0].cpu_data.item()
    if name in COPIES:
        return copy_tensors(name, args, kwargs, target)
    if name == "is_pinned":
        return False
    if name == "record_stream":
        return None  # FakeCuda.record_stream has been called by what needs it
    if kwargs.get("pin_memory"):
        raise FakeCudaError(f"{func}: only CPU tensors can be pinned, at {where()}")
    if target is not None and not is_on_gpu:  # such as empty_like(device="cpu")
        return run_on_cpu(func, name, args, kwargs)

    device = check_devices(func, name, tensors, target)
    result = run_on_cpu(func, name, args, kwargs)
    by_data = {id(one.cpu_data): one for one in fakes}  # operations in place return an argument
    if any(one.shape != one.cpu_data.shape for one in fakes):
        raise NotImplementedError(f"{func} has resized an argument: not simulated")
    wrapped = map_tensors(lambda real: by_data[id(real)] if id(real) in by_data else wrap(real, device), result)
    record_accesses(func, name, args, kwargs, wrapped)
    if name in WAITING or (name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])):
        launch_and_wait(name)
    return wrapped


def check_devices(func: Any, name: str, tensors: Iterable[torch.Tensor], target: torch.device | None) -> torch.device:
    """Check that all tensors of an operation are on one device, and return it.

    Raises:
        FakeCudaError: they are not. CPU scalars are allowed where CUDA's kernels accept them.
    """
    device = next((one.device for one in tensors if isinstance(one, FakeCuda)), target)
    assert device is not None
    accepts_scalars = torch.Tag.pointwise in func.tags or name in WITH_SCALARS
    accepts_scalars = accepts_scalars and "_foreach" not in name and "_fused" not in name
    for one in tensors:
        is_accepted = name in MIXED or (accepts_scalars and one.dim() == 0)
        if one.device != device and (isinstance(one, FakeCuda) or not is_accepted):
            raise FakeCudaError(
                f"{func}: Expected all tensors to be on the same device, but found {device} and "
                f"{one.device} {tuple(one.shape)}, at {where()}"
            )
    return device


def run_on_cpu(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation's result with the CPU's kernel, of the CPU tensors that stand for CUDA tensors."""
    args, kwargs = map_tensors(data_of, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    if name in ("_fused_adamw_", "_fused_adam_"):
        return run_without_tails(func, args, kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags:
        with random_numbers_of_device():
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def run_without_tails(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Run a fused optimizer so that an element's result does not depend on its place in the tensor, as on GPUs.

    The CPU's kernel computes the last elements, which don't fill a vector, differently.
    """
    padded = [[torch.nn.functional.pad(t.reshape(-1), (0, -t.numel() % 64)) for t in one] for one in args[:4]]
    func(*padded, *args[4:], **kwargs)
    for tensors, results in zip(args[:4], padded, strict=True):
        for tensor, result in zip(tensors, results, strict=True):
            tensor.copy_(result[: tensor.numel()].view(tensor.shape))


def copy_tensors(name: str, args: Any, kwargs: dict[str, Any], target: torch.device | None) -> Any:
    """Run `copy_`, `_foreach_copy_`, or `_to_copy`, which `Tensor.to` calls."""
    options = {key: value for key, value in kwargs.items() if key != "device"}
    non_blocking = bool(options.pop("non_blocking", args[2] if len(args) > 2 else False))
    if name == "copy_":
        return _copy_into(args[0], args[1], non_blocking)
    if name == "_foreach_copy_":
        for destination, source in zip(args[0], args[1], strict=True):
            _copy_into(destination, source, non_blocking)
        return None
    source, pin = args[0], options.pop("pin_memory", None)
    real = aten._to_copy.default(data_of(source), **options)
    target = source.device if target is None else target
    if target.type != "cuda" and (non_blocking or pin):  # PyTorch pins the result of a copy without waiting
        real = real.pin_memory()
    result = wrap(real, target) if target.type == "cuda" else real
    _transfer(source, result, non_blocking)
    return result


def _copy_into(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    data_of(destination).copy_(data_of(source))
    _transfer(source, destination, non_blocking)
    return destination


def _transfer(source: torch.Tensor, destination: torch.Tensor, non_blocking: bool) -> None:
    """Enqueue a copy. The host waits unless the copy is `non_blocking` and the host's memory is pinned."""
    reads = [source.cpu_data] if isinstance(source, FakeCuda) else []
    writes = [destination.cpu_data] if isinstance(destination, FakeCuda) else []
    host = destination if reads else source
    if (reads and writes) or not host.numel():  # without elements there is nothing to read too early
        launch("copy", reads, writes)
    elif non_blocking and aten.is_pinned.default(host):
        launch("copy", reads, writes)
        stream = guard.current_stream(guard.device())
        access = Access(stream, guard.launch(stream), "copy without waiting")
        host_memory_of(host).access(access, is_write=bool(reads))
    else:
        pageable = ", from pageable memory" if non_blocking else ""
        launch_and_wait(f"copy {'to the host' if reads else 'to the device'}{pageable}", reads, writes)


def record_accesses(func: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
    """Record the memory that an operation's kernel reads and writes."""
    positions_and_names, is_view = effects_of(func)
    if is_view or name.startswith(("empty", "new_empty")):
        return
    written = [value for key, value in (*enumerate(args), *kwargs.items()) if key in positions_and_names]
    writes = {id(one.cpu_data): one.cpu_data for one in tensors_in(written, result) if isinstance(one, FakeCuda)}
    only_shapes = name.startswith("new_") or name.endswith("_like")
    arguments = [] if only_shapes else tensors_in(args, kwargs)
    reads = [one.cpu_data for one in arguments if isinstance(one, FakeCuda) and id(one.cpu_data) not in writes]
    launch(name, reads, list(writes.values()))
