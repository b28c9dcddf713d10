"""The highest speed of square matrix products, on all ranks at the same time: the peak of their devices together.

torchrun … peak.py PRECISION OUTPUT.json
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

precision, output = sys.argv[1:]
device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
if device != "cpu":
    torch.cuda.set_device(device)
dist.init_process_group("gloo" if device == "cpu" else "nccl")
n = 2048 if device == "cpu" else 8192  # large enough for the peak, and on CPUs that emulate bf16 a matter of seconds
# Not constant: products of constant matrices draw less power, so a GPU would run faster than in training.
matrix = torch.rand(n, n).to(device, torch.bfloat16 if precision == "bf16" else torch.float32)
seconds = []
for _ in range(6):  # the first product initializes the library
    if device != "cpu":
        torch.cuda.synchronize()
    began = time.perf_counter()
    torch.matmul(matrix, matrix)
    if device != "cpu":
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - began)
flops = torch.tensor(2 * n**3 / min(seconds), dtype=torch.float64, device=device)
dist.all_reduce(flops)
if dist.get_rank() == 0:
    with open(output, "w") as file:
        json.dump({"flops": float(flops)}, file)
dist.destroy_process_group()
