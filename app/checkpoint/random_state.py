"""The state of every random number generator of a process, as tensors."""

from __future__ import annotations

import random

import numpy as np
import torch

from app.distributed.world import World
from app.strategies.base import Tensors


def get_random_state(world: World) -> Tensors:
    """Return the state of this process's generators: torch's on CPU and GPU, NumPy's and Python's."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, python_gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_rest": torch.tensor([] if python_gauss is None else [python_gauss], dtype=torch.float64),
    }
    if world.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(world.device)
    return state


def set_random_state(state: Tensors, world: World) -> None:
    """Restore what `get_random_state` returned."""
    torch.set_rng_state(state["torch"])
    position, has_gauss, gauss = state["numpy_rest"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))
    version, *words = state["python"].tolist()
    rest = state["python_rest"].tolist()
    random.setstate((version, tuple(words), rest[0] if rest else None))
    if world.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], world.device)
