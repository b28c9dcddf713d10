"""One defect per function, and programs without one, for test_rules.py. Run by launch.py on two ranks.

Writes what each function raised and what the report then held into a JSON file for each rank: `DEFECTS/<rank>.json`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from fake_cuda.planting import ALL, RANK, SIZE, Function, on_gpu, planted
from fake_cuda.report import REPORT

# ---- process groups: these two come first --------------------------------------------------------------------------


@planted
def group_without_device_id() -> None:
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


@planted
def group_of_another_device() -> None:
    dist.init_process_group("nccl", device_id=torch.device("cuda", 1 - RANK))


@planted
def group_of_this_device() -> None:
    dist.init_process_group("nccl", device_id=torch.device("cuda", RANK))
    assert dist.get_backend() == "nccl"


# ---- devices of an operation ---------------------------------------------------------------------------------------


@planted
def device_that_does_not_exist() -> None:
    torch.cuda.set_device(2)


@planted
def tensors_on_two_gpus() -> None:
    torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")


@planted
def tensors_on_gpu_and_cpu() -> None:
    on_gpu() + torch.ones(SIZE)


@planted
def assignment_of_a_slice_from_the_cpu() -> None:  # a copy, which may cross devices
    on_gpu()[:2] = torch.ones(2)


@planted
def matrix_product_with_the_cpu() -> None:
    torch.ones(2, 2, device="cuda") @ torch.ones(2, 2)


@planted
def cpu_scalar() -> None:
    on_gpu() * torch.tensor(2.0)


@planted
def cpu_scalar_for_a_list_of_tensors() -> None:
    torch._foreach_mul_([on_gpu()], torch.tensor(2.0))


@planted
def stack_with_a_cpu_scalar() -> None:
    torch.stack([on_gpu().sum(), torch.tensor(2.0)])


@planted
def pinned_gpu_memory() -> None:
    torch.ones(2, device="cuda", pin_memory=True)


# ---- collectives ---------------------------------------------------------------------------------------------------


@planted
def nccl_with_a_cpu_tensor() -> None:
    dist.all_reduce(torch.ones(SIZE))


@planted
def nccl_with_another_gpus_tensor() -> None:
    dist.all_reduce(torch.ones(SIZE, device=f"cuda:{1 - RANK}"))


@planted
def nccl_with_gaps() -> None:
    dist.all_reduce(torch.ones(4, 4, device="cuda").t()[:2])


@planted
def nccl_with_a_type_that_it_lacks() -> None:
    dist.all_reduce(torch.ones(4, device="cuda", dtype=torch.int16))


@planted
def gloo_with_a_gpu_tensor() -> None:
    dist.all_reduce(on_gpu(), group=dist.new_group(backend="gloo"))


@planted
def correct_collectives() -> None:
    tensor = torch.full((4,), RANK + 1.0, device="cuda")
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * 4
    average = torch.full((4,), RANK + 1.0, device="cuda")
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    assert average.tolist() == [1.5] * 4
    gathered = torch.empty(2, device="cuda")
    dist.all_gather_into_tensor(gathered, torch.full((1,), float(RANK), device="cuda"))
    assert gathered.tolist() == [0.0, 1.0]
    received = torch.empty(2, device="cuda")
    dist.all_to_all_single(received, torch.tensor([RANK, RANK + 10.0]).cuda())
    assert received.tolist() == ([0.0, 1.0] if RANK == 0 else [10.0, 11.0])
    on_cpu = torch.ones(2)
    dist.all_reduce(on_cpu, group=dist.new_group(backend="gloo"))
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert tensor.tolist() == [6.0] * 4


@planted
def result_of_a_collective_before_it_is_there() -> None:
    tensor = on_gpu()
    work = dist.all_reduce(tensor, async_op=True)
    tensor.mul_(2)
    work.wait()


def run(function: Function) -> dict[str, Any]:
    """Run a function. Return what it raised, and the report."""
    torch.cuda.synchronize()
    torch.cuda.set_device(RANK)
    REPORT.clear()
    error = None
    try:
        function()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "line": function.__code__.co_firstlineno} | REPORT.as_dict()


if __name__ == "__main__":
    import fake_cuda.planted_races  # noqa: F401  (its functions come after those above)

    results = {name: run(function) for name, function in ALL.items()}
    (Path(os.environ["DEFECTS"]) / f"{RANK}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
