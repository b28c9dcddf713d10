"""Process groups with the backend NCCL, which are run by gloo and recorded as NCCL's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from fake_cuda import guard
from fake_cuda.report import REPORT, FakeCudaError

NCCL_GROUPS: set[str] = set()  # names


def is_nccl(group: Any) -> bool:
    """Whether a process group was created with NCCL."""
    return group.group_name in NCCL_GROUPS


def install() -> None:
    """Replace the functions that create process groups, and those that return their backends."""
    original_init, original_new, original_backend = dist.init_process_group, dist.new_group, dist.get_backend

    def init_process_group(backend: Any = None, *args: Any, device_id: Any = None, **options: Any) -> None:
        if backend != "nccl":
            original_init(backend, *args, **options)
            return
        current = torch.device("cuda", guard.device())
        if device_id is None:
            REPORT.notes["init_process_group('nccl') without device_id"] += 1
        elif device_id != current:
            raise FakeCudaError(f"init_process_group: device_id={device_id}, but the current device is {current}")
        original_init("gloo", *args, **options)
        assert dist.group.WORLD is not None
        NCCL_GROUPS.add(dist.group.WORLD.group_name)

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any) -> Any:
        assert dist.group.WORLD is not None
        on_nccl = backend == "nccl" or (backend is None and is_nccl(dist.group.WORLD))
        group = original_new(ranks, timeout, "gloo" if on_nccl else backend, *args, **options)
        if on_nccl and isinstance(group, dist.ProcessGroup):  # otherwise this rank is not in it
            NCCL_GROUPS.add(group.group_name)
        return group

    def get_backend(group: Any = None) -> str:
        group = group or dist.group.WORLD
        return "nccl" if group is not None and is_nccl(group) else str(original_backend(group))

    original_all_reduce = dist.all_reduce

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op != dist.ReduceOp.AVG or async_op:
            return original_all_reduce(tensor, op, group, async_op)
        original_all_reduce(tensor, dist.ReduceOp.SUM, group)  # gloo has no average
        tensor.div_(dist.get_world_size(group))
        return None

    dist.all_reduce = dist.distributed_c10d.all_reduce = all_reduce
    for module in (dist, dist.distributed_c10d, device_mesh):
        for replacement in (init_process_group, new_group, get_backend):
            setattr(module, replacement.__name__, replacement)
