"""Every random number generator continues from where it was saved."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds import fake_world

from app.checkpoint.random_state import get_random_state, set_random_state


@given(seed=st.integers(0, 2**32 - 1), drawn=st.integers(0, 1300), gaussian=st.booleans())
def test_every_generator_continues_from_any_state(seed, drawn, gaussian):
    """NumPy and Python draw Gaussians in pairs: after an odd number of them, one is kept in the state."""
    world = fake_world()
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    torch.rand(drawn), np.random.rand(drawn), [random.random() for _ in range(drawn)]
    if gaussian:
        torch.randn(1), np.random.randn(), random.gauss(0, 1)

    def draw():
        return (
            *(torch.rand(3).tolist(), torch.randn(17).tolist()),
            *(np.random.rand(3).tolist(), np.random.randn(3).tolist()),
            *([random.random() for _ in range(3)], [random.gauss(0, 1) for _ in range(3)]),
        )

    before = {name: value.clone() for name, value in get_random_state(world).items()}
    expected = draw()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    set_random_state(before, world)
    assert draw() == expected
