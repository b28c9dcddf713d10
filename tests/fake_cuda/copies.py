"""Copies between devices: which of them make the host wait, and which memory a copy without waiting uses."""

from __future__ import annotations

from typing import Any

import torch

from fake_cuda import guard
from fake_cuda.memory import Access, host_memory_of, launch, launch_and_wait
from fake_cuda.tensor import FakeCuda, data_of, wrap

aten = torch.ops.aten


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
