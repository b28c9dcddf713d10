"""What machine and what code this is; where that isn't known, None and never a guess."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys

import torch

from app.settings import REPOSITORY

# Dense bf16 (tensor cores) and fp32 (CUDA cores; PyTorch leaves TF32 off for matrix products) in FLOP/s, by the exact
# name that the driver reports. From NVIDIA's data sheets, which list tensor core figures with sparsity, twice the dense
# ones: "H100 Tensor Core GPU" (SXM: 1,979 and 67 TFLOPS; NVL: 1,671 and 60; its first edition for PCIe: 1,513 and 51),
# "H200 Tensor Core GPU" (SXM: 1,979 and 67; NVL: 1,671 and 60), "A100 Tensor Core GPU" (every form: 624 and 19.5).
DATA_SHEETS = {
    "NVIDIA H200": (989.5e12, 67e12),
    "NVIDIA H200 NVL": (835.5e12, 60e12),
    "NVIDIA H100 80GB HBM3": (989.5e12, 67e12),  # SXM
    "NVIDIA H100 NVL": (835.5e12, 60e12),
    "NVIDIA H100 PCIe": (756.5e12, 51e12),
    "NVIDIA A100-SXM4-40GB": (312e12, 19.5e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 19.5e12),
    "NVIDIA A100-PCIE-40GB": (312e12, 19.5e12),
    "NVIDIA A100 80GB PCIe": (312e12, 19.5e12),
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Look up the dense peak of a device in FLOP/s.

    Args:
        device_name: as `device_name` returns it. Only exact names match: a part of a name would credit a MIG slice
            ("NVIDIA H100 80GB HBM3 MIG 1g.10gb") or a slower variant (H20, H800, GH200) with another device's peak.
        precision: `fp32` or `bf16`; others are not listed.

    Returns:
        The peak, or None for a device or precision that is not listed: never a guess.
    """
    if device_name not in DATA_SHEETS:
        return None
    bf16, fp32 = DATA_SHEETS[device_name]
    return {"bf16": bf16, "fp32": fp32}.get(precision)


def use_deterministic_algorithms() -> None:
    """Make CUDA compute the same bits each time on the same hardware and library versions.

    Call it before the CUDA context and the NCCL communicator are created, in both training paths.

    Under strict determinism (warn_only=False) PyTorch raises where an operation has no deterministic implementation,
    takes the deterministic backward passes of flash and memory-efficient attention, leaves out cuDNN's attention, and
    turns NCCL's NVLS all-reduce off (NCCL_ALGO=^NVLS, unless the user has set NCCL_ALGO).
    """
    # Trainer's full_determinism would do the same to one path only, and add CUDA_LAUNCH_BLOCKING=1, which serializes
    # every kernel and is needed for no operation here. cuBLAS is deterministic with a workspace of fixed size; the
    # size is fixed here too, because another one may select other algorithms.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


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


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held: the allocator's peak on a GPU, the resident set's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
