"""Draw dropout masks for each row of the global batch, whatever micro-batch and rank it is in.

PyTorch draws the masks of a micro-batch from one sequential generator, so they depend on how the global batch is
divided, and drawing them takes a considerable part of a step on a CPU. Here each mask is a hash of the seed, the step,
the row of the global batch, the number of the dropout in the forward pass, and the position in the row. Integer
arithmetic gives the same bits on every device, with any number of threads.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from transformers import PretrainedConfig, PreTrainedModel

from ..common.errors import UserError

# The finalizer of MurmurHash3 (Austin Appleby, public domain) multiplies by these, and 2^32 divided by the golden ratio
# spreads consecutive positions. As signed integers, since PyTorch has no shifts and products of unsigned ones.
FIRST_FACTOR, SECOND_FACTOR, GOLDEN_RATIO = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32, 0x9E3779B9 - 2**32
LEVELS = 1 << 15  # a probability is rounded to a multiple of 1 / LEVELS, which needs 15 bits of a 16-bit integer
CALLS = 64  # dropouts whose keys are computed together
# The numbers of positions leave room for 4096 pairs of elements in the last dimension and for 8192 elements in the one
# before it. So they do not depend on how much padding these dimensions include, unless one of them is longer. In 32
# bits, 128 heads then have positions of their own.
PLACES = (1 << 12, 1 << 13)


class RowDropout(TorchFunctionMode):
    """A context in which a forward pass has dropout masks that belong to the rows of the global batch.

    It replaces each `torch.nn.functional.dropout` of a tensor (rows, …) of two to four dimensions, such as hidden
    states (rows, tokens, features) and eager attention's weights (rows, heads, tokens, tokens), unless it works in
    place. Everything else that a model draws at random, such as the masks of fused attention, has a seed per
    micro-batch, so it depends on the number of logical ranks.
    """

    def __init__(self, seed: int, step: int, rows: range) -> None:
        """
        Args:
            seed: `--seed`.
            step: the number of optimizer steps before this one.
            rows: the positions in the global batch of the micro-batch's rows.
        """
        super().__init__()
        seed_generators(seed, step, rows.start)
        self.seed, self.step, self.rows = seed, step, rows
        self.call = 0  # the number of the next dropout in this forward pass
        self.keys: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of CALLS dropouts at a time, (CALLS, rows)
        self.positions: dict[torch.Size, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0917 (the caller's signature)
        if func is functional.dropout:
            return self.dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def dropout(  # noqa: PLR0917 (the signature of PyTorch's function)
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        """Do what `torch.nn.functional.dropout` does."""
        if not training or p == 0:
            return input
        if not 0 < p < 1 or inplace or not 2 <= input.ndim <= 4 or len(input) != len(self.rows):
            return functional.dropout(input, p, training, inplace)
        dropped = min(round(p * LEVELS), LEVELS - 1)  # of LEVELS: not all of them, because the rest is scaled
        # The mask has the values 0 and -1, which the scale turns into 0 and 1 / (1 - p).
        return (input * self.mask(input, dropped)).mul_(-LEVELS / (LEVELS - dropped))

    def mask(self, like: torch.Tensor, dropped: int) -> torch.Tensor:
        """Return 0 for each element to drop and -1 for each other one, int16, in the shape of a tensor (rows, …)."""
        first, second = (key.view(-1, *[1] * (like.ndim - 1)) for key in self.keys_of_call(like.device))
        n = like.shape[-1]
        # Each hash of 32 bits serves two neighbors along the last dimension.
        bits = hash_integers(self.hashed_positions(like), first, second).view(torch.int16)[..., :n]
        # `bits & 0x7FFF < dropped` without a comparison, whose result PyTorch would have to convert: the sign bit of
        # the difference, copied to all bits of the integer and inverted.
        return bits.bitwise_and_(LEVELS - 1).sub_(dropped).bitwise_not_().bitwise_right_shift_(15)

    def keys_of_call(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two keys for each row, int32 (rows,), which belong to the next dropout of the forward pass."""
        block, place = divmod(self.call, CALLS)
        self.call += 1
        if block not in self.keys:
            keys = np.random.SeedSequence((self.seed, self.step)).generate_state(4, np.uint32).view(np.int32).tolist()
            rows = torch.arange(self.rows.start, self.rows.stop, self.rows.step, dtype=torch.int32, device=device)
            of_rows = hash_integers(rows, keys[0], keys[1]), hash_integers(rows, keys[2], keys[3])
            calls = torch.arange(block * CALLS, (block + 1) * CALLS, dtype=torch.int32, device=device).unsqueeze(1)
            self.keys[block] = hash_integers(calls, *of_rows), hash_integers(calls, *of_rows[::-1])
        first, second = self.keys[block]
        return first[place], second[place]

    def hashed_positions(self, like: torch.Tensor) -> torch.Tensor:
        """Return a number for each pair of elements of a row, int32, in the shape of `like` without its rows."""
        if like.shape not in self.positions:
            *outer, n = like.shape[1:]
            size, stride = (n + 1) // 2, 1
            numbers = torch.arange(size, dtype=torch.int32, device=like.device)
            for next_size, places in zip(outer[::-1], PLACES, strict=False):
                size, stride = next_size, stride * max(size, places)
                as_int32 = (stride + 2**31) % 2**32 - 2**31
                of_dimension = torch.arange(size, dtype=torch.int32, device=like.device) * as_int32
                numbers = of_dimension.view(-1, *[1] * numbers.ndim) + numbers
            self.positions[like.shape] = numbers * GOLDEN_RATIO
        return self.positions[like.shape]


def override_dropout(config: PretrainedConfig, probability: float) -> None:
    """Set every dropout probability in a config, by any name, but not LayerDrop, which skips whole layers."""
    for name, value in [*vars(config).items()]:
        if isinstance(value, PretrainedConfig):  # of an encoder, or of the text
            override_dropout(value, probability)
        elif type(value) in (float, int, type(None)) and (value or 0) <= 1 and ("dropout" in name or "pdrop" in name):
            vars(config)[name] = probability  # in a field that may be an integer in its declaration


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute the activations of each layer in the backward pass, with the same dropout masks.

    Activation checkpointing: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".

    Raises:
        UserError: the model does not support it.
    """
    # Code for older versions of transformers calls torch.utils.checkpoint without these contexts.
    is_old = "value" in signature(model._set_gradient_checkpointing).parameters
    if is_old or not model.supports_gradient_checkpointing:
        raise UserError(f"--activation_checkpointing: {type(model).__name__} does not support it: remove the flag")
    model.activation_checkpointing_enable(
        {"use_reentrant": False, "preserve_rng_state": True, "context_fn": contexts_of_checkpointing}
    )


def contexts_of_checkpointing() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a forward pass and of its repetition, for `torch.utils.checkpoint.checkpoint`."""
    # A copy keeps the number of the next dropout.
    repetitions = [copy(mode) for mode in _get_current_function_mode_stack() if isinstance(mode, RowDropout)]
    return nullcontext(), repetitions[0] if repetitions else nullcontext()


def hash_integers(numbers: torch.Tensor, first: Any, second: Any) -> torch.Tensor:
    """Hash int32 numbers with two keys, which are integers or tensors that broadcast. Returns int32.

    For given keys, different numbers have different hashes.
    """
    hashed: torch.Tensor = numbers ^ first
    shifted = hashed >> 16  # PyTorch shifts copies of the sign bit in: they are removed
    hashed ^= shifted.bitwise_and_(0xFFFF)
    hashed *= FIRST_FACTOR
    hashed ^= torch.bitwise_right_shift(hashed, 13, out=shifted).bitwise_and_(0x7FFFF)
    hashed += second
    hashed *= SECOND_FACTOR
    hashed ^= torch.bitwise_right_shift(hashed, 16, out=shifted).bitwise_and_(0xFFFF)
    return hashed


def seed_generators(seed: int, step: int, row: int) -> None:
    """Seed the random number generators of PyTorch (CPU and GPU), NumPy and Python for one micro-batch.

    The state follows from the arguments alone, so checkpoints need no random number generator states.

    Args:
        seed: `--seed`.
        step: the number of optimizer steps before this one.
        row: the position in the global batch of the micro-batch's first row.
    """
    # SeedSequence turns similar numbers into unrelated seeds. Sums such as seed + step would repeat the random numbers
    # of one micro-batch in another one of the next step.
    mixed = int(np.random.SeedSequence((seed, step, row)).generate_state(1, np.uint64)[0])
    torch.default_generator.manual_seed(mixed)  # torch.manual_seed takes a hundred times as long
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)
    random.seed(mixed)
