"""What machine and what code this is; where that isn't known, None and never a guess."""

from __future__ import annotations

import platform
import subprocess

import torch

from app.settings import REPOSITORY


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak of the device in FLOP/s, from the vendor's data sheets; None for a device not listed: never a
    guess."""
    sheets = {"H200": (989e12, 67e12), "H100": (989e12, 67e12), "A100": (312e12, 19.5e12)}  # bf16, fp32
    for name, (bf16, fp32) in sheets.items():
        if name in device_name and "PCIe" not in device_name:
            return {"bf16": bf16, "fp32": fp32}.get(precision)
    return None


def git_commit() -> str | None:
    """The commit of the code that runs, with `+` where tracked files were changed since; None outside a checkout."""
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip()


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()})"
