"""samebits: fine-tune a text classifier with PyTorch DDP and with transformers.Trainer, bitwise identically."""

import gc
import sys

# Importing torch and transformers creates a million objects, but hardly any garbage. Without garbage collections until
# `stop_importing`, and with rarer ones afterwards, a process starts and exits sooner.
gc.set_threshold(20_000, 20, 20)
if sys.argv[:1] == ["-m"]:  # python -m app.…
    gc.disable()


def stop_importing() -> None:
    """Exempt everything that has been imported from garbage collections, and enable them. Programs call it first."""
    gc.freeze()
    gc.enable()
