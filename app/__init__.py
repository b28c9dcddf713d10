"""samebits: fine-tune a text classifier with PyTorch DDP and with transformers.Trainer, bitwise identically."""

import gc
import os
import sys

# Importing torch and transformers creates a million objects, but hardly any garbage. Without garbage collections until
# `program.stop_importing`, and with rarer ones afterwards, a process starts and exits sooner.
gc.set_threshold(20_000, 20, 20)
if sys.argv[:1] == ["-m"]:  # python -m app.…: Python imports this package, and then the program
    gc.disable()
    # A thread that waits for another one would use its core up to the end of its time slice, which other programs, or
    # even the thread that it waits for, have to wait for. OpenMP reads the variable when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from .common.terminal import exit_on_interrupt

    exit_on_interrupt()
    from .early import check_command_line

    check_command_line()
