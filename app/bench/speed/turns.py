"""Let several trainings in one process take turns: exactly one trains at a time, in the same order on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from ...distributed.world import World


class Ended(BaseException):
    """Raised in a training's thread to end it. No `except Exception` of a library stops it."""


class Turns:
    """A training in a thread of its own, which trains for some optimizer steps at a time and then waits.

    A loop such as Trainer's cannot be left and entered again without repeating its start: it would wrap the model,
    rebuild DDP's buckets and start the data loader again. None of that is to be measured, so the loop waits in between.
    """

    def __init__(self, training: Callable[[], object], world: World) -> None:
        """`training` calls `after_step` after each optimizer step."""
        self.training, self.world = training, world
        self.turn, self.turn_over = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.steps_left, self.is_ending = 0, False
        self.failure: BaseException | None = None

    def train(self, steps: int) -> None:
        """Train for a number of optimizer steps, and raise what the training raises."""
        self.steps_left = steps
        self._take_turn()

    def end(self) -> None:
        """End the training where it waits, and release its memory."""
        self.is_ending = True
        if self.thread.is_alive():
            self._take_turn()
            self.thread.join()
        del self.training

    def after_step(self) -> None:
        self.steps_left -= 1
        if self.steps_left == 0:
            self.turn_over.release()
            self.turn.acquire()
            if self.is_ending:
                raise Ended

    def _take_turn(self) -> None:
        if self.thread.ident is None:
            self.thread.start()
        else:
            self.turn.release()
        self.turn_over.acquire()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            # Both belong to the thread. Without the first one, OpenMP would use another number of threads.
            torch.set_num_threads(torch.get_num_threads())
            if self.world.device.type == "cuda":
                torch.cuda.set_device(self.world.device)
            self.training()
            raise AssertionError("the training has ended before its last turn")
        except Ended:
            pass
        except BaseException as failure:
            self.failure = failure
        finally:
            self.turn_over.release()


class AccelerateState:
    """What accelerate keeps once per process, such as the precision, for one of several trainings."""

    SHARED: tuple[Any, ...] = (PartialState, AcceleratorState, GradientState)

    def __init__(self) -> None:
        self.contents: list[dict[str, Any]] = [{} for _ in self.SHARED]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A context in which accelerate uses this state. Its objects refer to these dicts, so they are not replaced."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for i, owner in enumerate(self.SHARED):
            other = dict(owner._shared_state)
            owner._shared_state.clear()
            owner._shared_state.update(self.contents[i])
            self.contents[i] = other
