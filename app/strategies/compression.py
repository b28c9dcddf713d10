"""Compress the gradients that the ranks exchange (`--ddp_comm_hook`), as DDP communication hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ..common.machine import DTYPES
from ..distributed.world import World
from .reduction import FixedOrderAllReduce, Gradients, TreeSum

HOOK_DTYPES = {name: DTYPES[name] for name in ("fp16", "bf16")}
# PyTorch's documentation of PowerSGDState: "Typically only a small value 1-4 is used". With more than 2, PyTorch
# orthogonalizes by QR. Its Gram-Schmidt process, for 1 and 2, would divide by zero if a gradient is a matrix of zeros,
# and overestimate one of a lower rank.
MATRIX_RANK = 4
MIN_COMPRESSION_RATE = 2  # PyTorch's default
UNCOMPRESSED_SHARE = 0.1  # the same documentation: "we suggest to start with 10% of total training steps"


class RoundedAllReduce(FixedOrderAllReduce):
    """A DDP communication hook that rounds gradients to 16 bits, and sums them over the ranks in the order of the tree.

    PyTorch's `fp16_compress_hook` and `bf16_compress_hook` round the sum of a process's gradients, so their results
    depend on the number of processes. Here the gradient of each logical rank is rounded, and so is each sum in the
    tree. With two processes and one logical rank each, both are the same.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], sums: TreeSum, *, world: World, dtype: torch.dtype, factor: int
    ) -> None:
        """Round to `dtype` (fp16 or bf16). `factor` is the `loss_factor` of the run."""
        super().__init__(parameters, sums, levels=world.levels, device=world.device)
        self.dtype, self.factor = dtype, factor

    def compress(self, gradient: torch.Tensor) -> torch.Tensor:
        """Round a gradient of one logical rank. Overwrites it.

        It is divided before it is rounded, to avoid an overflow of the sum. The loss has been divided by the number of
        this process's logical ranks, so the quotient does not depend on the number of processes.
        """
        return gradient.div_(self.size * self.factor).to(self.dtype)

    def add(self, leaf: Gradients) -> None:
        self.sums.add([self.compress(gradient) for gradient in leaf])

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        compressed = self.compress(buffer)
        self.add_partial_sums(bucket, compressed)
        total: torch.futures.Future[Any]
        if self.size <= 2:
            total = dist.all_reduce(compressed, async_op=True).get_future()
        else:
            if self.stream is not None:
                compressed.record_stream(self.stream)  # its memory was allocated on another stream
            total = self.exchange(compressed, bucket.is_last(), divisor=1)

        def decompress(_: Any) -> torch.Tensor:
            buffer.copy_(compressed)
            return buffer if self.factor == 1 else buffer.mul_(self.factor)

        return total.then(decompress)


def register_power_sgd(wrapped: DistributedDataParallel, world: World, *, total_steps: int, seed: int) -> None:
    """Exchange a low-rank approximation of each gradient matrix, by PyTorch's own hook (Vogels et al. 2019).

    Each rank adds the error of its approximations to its gradients of the next step. The errors are part of no
    checkpoint and depend on the number of ranks, so two runs are bitwise identical only without an interruption and
    with the same number of ranks.
    """
    state = PowerSGDState(
        None if world.device.type == "cuda" else BlockingGroup(),  # None: the default process group
        matrix_approximation_rank=MATRIX_RANK,
        min_compression_rate=MIN_COMPRESSION_RATE,
        # The first step whose gradients are compressed. PyTorch requires at least 2.
        start_powerSGD_iter=max(2, int(total_steps * UNCOMPRESSED_SHARE)),
        random_seed=seed,
    )
    wrapped.register_comm_hook(state, powerSGD_hook)


class BlockingGroup:
    """The default process group, with an all-reduce that waits until it is done.

    Otherwise gloo's threads would run parts of `powerSGD_hook` as callbacks, which compute with another number of
    threads than this one and start further collectives. The results could then vary from run to run.
    """

    def size(self) -> int:
        return dist.get_world_size()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        assert dist.group.WORLD is not None
        work = dist.group.WORLD.allreduce(tensors, options)
        work.wait()
        return work
