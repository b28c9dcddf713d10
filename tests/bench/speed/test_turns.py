"""Trainings that take turns: one at a time, each where it was, and with accelerate's state of its own."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from app.bench.speed.turns import AccelerateState, Turns
from app.common.errors import UserError


def test_trainings_train_only_in_their_turns_and_never_start_again(world):
    made: list[str] = []
    trainings: dict[str, Turns] = {}

    def train(name: str) -> None:
        made.append(f"start {name}")
        for step in range(100):
            made.append(f"{name}{step}")
            trainings[name].after_step()

    trainings |= {name: Turns(lambda name=name: train(name), world) for name in "ab"}
    trainings["a"].train(2)
    trainings["b"].train(1)
    trainings["a"].train(1)
    assert made == ["start a", "a0", "a1", "start b", "b0", "a2"]
    for turns in trainings.values():
        turns.end()
        assert not turns.thread.is_alive()
    assert len(made) == 6, "no training trains when it is ended"


def test_a_training_that_had_no_turn_can_be_ended(world):
    Turns(lambda: pytest.fail("it was not its turn"), world).end()


def test_the_failure_of_a_training_is_raised_where_it_was_given_its_turn(world):
    def fail() -> None:
        turns.after_step()
        raise UserError("too large")

    turns = Turns(fail, world)
    turns.train(1)
    with pytest.raises(UserError, match="too large"):
        turns.train(1)
    with pytest.raises(AssertionError, match="has ended before its last turn"):
        Turns(lambda: None, world).train(1)


def test_a_training_cannot_keep_its_turn_by_catching_exceptions(world):
    def stubborn() -> None:
        while True:
            try:
                turns.after_step()
            except Exception:
                pytest.fail("the end is no exception of a library's kind")

    turns = Turns(stubborn, world)
    turns.train(3)
    turns.end()
    assert not turns.thread.is_alive()


def test_a_training_has_the_threads_of_the_process(world):
    library = next(iter((Path(torch.__file__).parent / "lib").glob("libgomp*")), None)
    if library is None:
        pytest.skip("this PyTorch has another OpenMP")
    # PyTorch's own number is set for a new thread when it is asked for, but not when matrices are multiplied.
    threads_of_openmp = ctypes.CDLL(str(library)).omp_get_max_threads
    found = []

    def train() -> None:
        found.append((threading.current_thread() is threading.main_thread(), threads_of_openmp()))
        turns.after_step()

    before, threads = torch.get_num_threads(), (os.cpu_count() or 1) + 1  # no default
    torch.set_num_threads(threads)
    try:
        turns = Turns(train, world)
        turns.train(1)
        turns.end()
    finally:
        torch.set_num_threads(before)
    assert found == [(False, threads)]


def test_each_training_has_accelerates_state_of_its_own(world):
    states = {precision: AccelerateState() for precision in ("no", "bf16")}
    accelerators = {}
    for precision, state in states.items():  # the second one would be rejected if the first one's state were there
        with state.in_use():
            accelerators[precision] = Accelerator(cpu=True, mixed_precision=precision)
    for precision, state in reversed(states.items()):
        with state.in_use():
            assert accelerators[precision].mixed_precision == precision
            accelerators[precision].gradient_state._set_sync_gradients(precision == "bf16")
    for precision, state in states.items():
        with state.in_use():
            assert accelerators[precision].sync_gradients == (precision == "bf16")
