"""Code of PyTorch that bypasses the dispatcher, and is replaced for that reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # noqa: F401 (before functions that it inspects are replaced)
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

from fake_cuda import guard
from fake_cuda.memory import access_on_host
from fake_cuda.tensor import FakeCuda, tensors_in, use_on_stream


def install() -> None:
    """Apply all patches."""
    torch._C._set_only_lift_cpu_tensors(True)
    _set_data()
    _record_futures()
    _check_host_reads()
    _profile_the_cpu()
    # FSDP2 frees the storage of a gathered parameter, which has no effect on the fake one.
    _fsdp_param.alloc_storage = _fsdp_param_group.alloc_storage = lambda tensor: None
    _fsdp_param.free_storage = lambda tensor: None


def _set_data() -> None:
    """`Module.to` and FSDP2 move a tensor by `tensor.data = …`, which can't make it a FakeCuda: swap the contents.

    Parameters stay the same objects, so tied ones stay tied, and optimizers keep theirs.
    """
    original = torch.Tensor.data

    def set_data(self: torch.Tensor, new: torch.Tensor) -> None:
        if not isinstance(new, FakeCuda):
            original.__set__(self, new)  # type: ignore[attr-defined]
            return
        if isinstance(self, torch.nn.Parameter):
            new = torch.nn.Parameter(new, self.requires_grad)
        vars(new).update(vars(self))
        torch.utils.swap_tensors(self, new)
        if (hooks := self._post_accumulate_grad_hooks) is not None:
            self._post_accumulate_grad_hooks = hooks  # which registers them with the new contents

    torch.Tensor.data = property(original.__get__, set_data)  # type: ignore[assignment,attr-defined]
    torch._has_compatible_shallow_copy_type = lambda *_: True  # `Module.to` would make new parameters otherwise
    # `swap_tensors` refuses tensors with weak references, which is too careful here: they remain valid.
    torch.utils.weakref = SimpleNamespace(getweakrefs=lambda tensor: [])  # type: ignore[assignment,attr-defined]


def _record_futures() -> None:
    """C++ records a future's tensors on the streams of its callbacks (`Future::synchronizeWithCurrentStreams`)."""
    original = torch.futures.Future.then

    def then(self: Any, callback: Any) -> Any:
        def record_and_call(future: Any) -> Any:
            for tensor in tensors_in(future.value()):
                if isinstance(tensor, FakeCuda):
                    use_on_stream(tensor, guard.current_stream(guard.device()))
            return callback(future)

        return original(self, record_and_call)

    torch.futures.Future.then = then  # type: ignore[method-assign]


def _check_host_reads() -> None:
    """These read a CPU tensor without an operation, maybe before a copy without waiting has written it."""
    for name in ("numpy", "tolist"):
        original = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, name: str = name, original: Any = original, **options: Any) -> Any:
            access_on_host(self, f"{name}()")
            return original(self, *args, **options)

        setattr(torch.Tensor, name, read)


def _profile_the_cpu() -> None:
    """Without CUDA events, PyTorch's profiler would print a warning for each operation."""
    original = torch.profiler.profile.__init__

    def init(self: torch.profiler.profile, *, activities: Any = None, **options: Any) -> None:
        original(self, activities=[torch.profiler.ProfilerActivity.CPU], **options)

    torch.profiler.profile.__init__ = init  # type: ignore[method-assign]
