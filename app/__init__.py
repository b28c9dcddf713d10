"""samebits: fine-tune a text classifier with PyTorch DDP and with transformers.Trainer, bitwise identically."""

import gc
import os
import signal
import sys


def exit_on_interrupt() -> None:
    """End the process at Ctrl-C until `stop_importing`: a traceback of the imports would help nobody."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if it is ignored
        signal.signal(signal.SIGINT, _interrupted)


def _interrupted(*_: object) -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    os._exit(130)


# Importing torch and transformers creates a million objects, but hardly any garbage. Without garbage collections until
# `stop_importing`, and with rarer ones afterwards, a process starts and exits sooner.
gc.set_threshold(20_000, 20, 20)
if sys.argv[:1] == ["-m"]:  # python -m app.…
    gc.disable()
    exit_on_interrupt()


def stop_importing() -> None:
    """Exempt everything that has been imported from garbage collections, and enable them. Programs call it first.

    From now on, Ctrl-C raises `KeyboardInterrupt`.
    """
    gc.freeze()
    gc.enable()
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
