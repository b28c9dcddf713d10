"""A training program with a fault: `faulty.py ddp_loop flip_bit [flags]`.

Faults are injected through hooks of PyTorch and Python, so that they depend on no function of `app`. They
take what else they need from environment variables.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any, NoReturn

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

RANK = os.environ.get("RANK", "0")


def signal_in_evaluation() -> None:
    """Send the signal SIGNAL to the last rank in its first evaluation, but not after a restart."""
    seen, trained = 0, False

    def count(module: Any, inputs: Any) -> None:
        nonlocal seen, trained
        trained = trained or module.training  # earlier passes find the side on which to pad
        if trained and not module.training and type(module).__name__.endswith("ForSequenceClassification"):
            seen += 1
            if seen == 3:  # batches
                os.kill(os.getpid(), signal.Signals[os.environ["SIGNAL"]])

    if int(RANK) == int(os.environ["WORLD_SIZE"]) - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        register_module_forward_pre_hook(count)


def flip_bit() -> None:
    """On the last rank, flip a bit of the gradient of the parameter NAME in the first micro-batch of step STEP."""
    step, hooked, flipped = 1, False, False

    def flip(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal flipped
        if step == int(os.environ["STEP"]) and not flipped:
            flipped, gradient = True, gradient.clone()
            gradient.view(torch.int32).view(-1)[0] ^= 1 << 20  # large enough to survive the sum
        return gradient

    def hook(module: torch.nn.Module, inputs: Any) -> None:
        nonlocal hooked
        if (parameter := dict(module.named_parameters()).get(os.environ["NAME"])) is not None and not hooked:
            hooked = bool(parameter.register_hook(flip))

    def count(*_: Any) -> None:
        nonlocal step
        step += 1

    if int(RANK) == int(os.environ["WORLD_SIZE"]) - 1:
        register_module_forward_pre_hook(hook)
        register_optimizer_step_post_hook(count)


def simulate_gpus() -> None:
    """Give the node of each rank as many GPUs as GPUS lists. Their memory is full: a process that starts CUDA fails.

    The rank UNKNOWN_FLAG_ON gets a flag that no program has.
    """

    def no_context() -> NoReturn:
        raise RuntimeError("CUDA error: out of memory")

    gpus = int(os.environ["GPUS"].split(",")[int(RANK)])
    torch.cuda.is_available = lambda: gpus > 0
    torch.cuda.device_count = lambda: gpus
    torch.cuda._lazy_init = no_context
    if os.environ.get("UNKNOWN_FLAG_ON") == RANK:
        sys.argv += ["--lerning_rate", "1"]


if __name__ == "__main__":
    path_name, fault = sys.argv[1:3]
    sys.argv = [path_name, *sys.argv[3:]]
    globals()[fault]()
    runpy.run_module(f"app.{path_name}", run_name="__main__", alter_sys=True)
