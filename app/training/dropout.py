"""Seed dropout, so that a micro-batch has the same masks on any process and after any interruption."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_micro_batch(seed: int, step: int, *, logical_rank: int, number: int) -> None:
    """Seed the random number generators of PyTorch (CPU and GPU), NumPy and Python for one micro-batch.

    The state follows from the arguments alone, so checkpoints need no random number generator states.

    Args:
        seed: `--seed`.
        step: the number of optimizer steps before this one.
        logical_rank: the logical rank whose rows the micro-batch holds.
        number: the number of the micro-batch among the logical rank's in this step, counted from 0.
    """
    # SeedSequence turns similar numbers into unrelated seeds. Sums such as seed + step would repeat the masks of one
    # logical rank in another one's next step.
    mixed = int(np.random.SeedSequence((seed, step, logical_rank, number)).generate_state(1, np.uint64)[0])
    torch.default_generator.manual_seed(mixed)  # torch.manual_seed takes a hundred times as long
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)
    random.seed(mixed)
