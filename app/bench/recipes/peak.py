"""The highest speed of square matrix products, on all ranks at the same time: the peak of their devices together.

torchrun … peak.py PRECISION OUTPUT.json
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

LARGEST = 8192  # rows of a matrix

precision, output = sys.argv[1:]
device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
if device != "cpu":
    torch.cuda.set_device(device)
dist.init_process_group("gloo" if device == "cpu" else "nccl")


def random_matrix(n: int) -> torch.Tensor:
    # Not constant: products of constant matrices draw less power, so a GPU would run faster than in training.
    return torch.rand(n, n).to(device, torch.bfloat16 if precision == "bf16" else torch.float32)


def seconds(matrix: torch.Tensor) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    torch.matmul(matrix, matrix)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


small = large = random_matrix(256)
seconds(small)  # initializes the library
while len(large) < LARGEST and seconds(large) < 0.05:  # on some CPUs, bf16 is very slow
    small, large = large, random_matrix(2 * len(large))
dist.barrier()
# Two sizes alternate, so that a slow moment affects both.
best = max(2 * len(matrix) ** 3 / seconds(matrix) for _ in range(5) for matrix in (small, large))
flops = torch.tensor(best, dtype=torch.float64, device=device)
dist.all_reduce(flops)
if dist.get_rank() == 0:
    with open(output, "w") as file:
        json.dump({"flops": float(flops)}, file)
dist.destroy_process_group()
