"""Compress the gradients that the ranks exchange (`--ddp_comm_hook`), as DDP communication hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, _should_compress, powerSGD_hook

from ..common.machine import DTYPES
from ..distributed.world import World
from .reduction import FixedOrderAllReduce, Gradients, TreeSum, future_on, gradients_in

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
        super().__init__(parameters, sums, world)
        self.dtype, self.factor = dtype, factor

    def compress(self, gradient: torch.Tensor) -> torch.Tensor:
        """Round a gradient of one logical rank. Overwrites it.

        It is divided before it is rounded, to avoid an overflow of the sum. The loss has been divided by the number of
        this process's logical ranks, so the quotient does not depend on the number of processes.
        """
        return gradient.div_(self.world.size * self.factor).to(self.dtype)

    def add(self, leaf: Gradients) -> None:
        self.sums.add([self.compress(gradient) for gradient in leaf])

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        compressed = self.compress(buffer)
        self.add_partial_sums(bucket, compressed)
        total: torch.futures.Future[Any]
        if self.world.size <= 2:
            total = dist.all_reduce(compressed, async_op=True).get_future()
        else:
            if self.stream is not None:
                compressed.record_stream(self.stream)  # its memory was allocated on another stream
            total = self.exchange(compressed, bucket.is_last(), divisor=1)

        def decompress(_: Any) -> torch.Tensor:
            buffer.copy_(compressed)
            return buffer if self.factor == 1 else buffer.mul_(self.factor)

        return total.then(decompress)


class PowerSGD:
    """A DDP communication hook that exchanges a low-rank approximation of each gradient matrix.

    This is PyTorch's implementation of PowerSGD (Vogels et al. 2019). The error of the approximation is
    added to the rank's gradients of the next step, so each rank has a state of its own. PyTorch keeps it for each of
    DDP's buckets. But DDP forms other buckets in the first step of a process than in the later ones, and a resumed run
    would continue with the wrong errors. So there is one exchange per step here, as in the paper, of all gradients in
    the order of the parameters. It begins when the backward pass is done.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], world: World, *, total_steps: int, seed: int) -> None:
        """Take all parameters that are trained. `seed` determines the first approximation."""
        self.parameters, self.world = parameters, world
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.waiting: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]] = []
        self.hook_state = PowerSGDState(
            None if world.device.type == "cuda" else BlockingGroup(),  # None: the default process group
            matrix_approximation_rank=MATRIX_RANK,
            min_compression_rate=MIN_COMPRESSION_RATE,
            # The first step whose gradients are compressed. PyTorch requires at least 2.
            start_powerSGD_iter=max(2, int(total_steps * UNCOMPRESSED_SHARE)),
            random_seed=seed,
        )

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Keep a bucket, and average all of them after the last one."""
        future = future_on(self.world.device)
        self.waiting.append((bucket.buffer(), future))
        self.gradients |= zip(bucket.parameters(), gradients_in(bucket, bucket.buffer()), strict=True)
        if bucket.is_last():
            gradients = [self.gradients[parameter] for parameter in self.parameters]
            complete = CompleteGradient(gradients)
            powerSGD_hook(self.hook_state, complete).wait()
            for gradient, average in zip(gradients, complete.gradients(), strict=True):
                gradient.copy_(average.view_as(gradient))
            for buffer, waiting in self.waiting:
                waiting.set_result(buffer)
            self.waiting.clear()
            self.gradients.clear()
        return future

    def _memory(self) -> dict[str, dict[int, torch.Tensor]]:
        """Return the tensors of each bucket that the next step depends on, by name."""
        # Random numbers are drawn once, in the first compressed step.
        state = self.hook_state
        return {"error": state.error_dict, "p": state.p_memory_dict, "q": state.q_memory_dict}

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = {"steps": torch.tensor(self.hook_state.iter)}
        return state | {name: by_bucket[0] for name, by_bucket in self._memory().items() if by_bucket}

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.hook_state.iter = int(tensors["steps"])
        for name, by_bucket in self._memory().items():
            by_bucket.clear()
            if name in tensors:
                # In memory of its own: matrix products may round differently if their operands are aligned differently.
                by_bucket[0] = tensors[name].to(self.world.device, copy=True)


def matrix_shape(parameter: torch.Tensor) -> tuple[int, int]:
    """Return the rows and columns of the matrix that PowerSGD makes of a parameter's gradient."""
    rows = parameter.shape[0] if parameter.ndim else 1
    return rows, parameter.numel() // rows


def is_compressed(rows: int, columns: int) -> bool:
    """Return whether PowerSGD approximates a matrix: the factors must have less than half as many elements."""
    rank = min(rows, columns, MATRIX_RANK)
    compressed: bool = _should_compress(rows, columns, rank, MIN_COMPRESSION_RATE)[0]
    return compressed


class CompleteGradient:
    """All gradients in one buffer. Has the methods of DDP's `GradBucket` that `powerSGD_hook` calls."""

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        self.flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.shapes = [gradient.shape or (1,) for gradient in gradients]  # powerSGD_hook cannot handle scalars

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        """Return views into the buffer, one for each parameter."""
        parts = self.flat.split([torch.Size(shape).numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


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
