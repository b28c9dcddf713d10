"""Worlds without processes, for tests of code that depends on the rank or the number of ranks."""

from datetime import timedelta

import torch
from torch.distributed import HashStore

from app.distributed.world import World


def fake_world(rank: int = 0, size: int = 1, device: torch.device | str = "cpu") -> World:
    """One rank's world on a single node, without a process group."""
    return World(rank, size, rank, size, torch.device(device), HashStore(), timedelta(seconds=60))
