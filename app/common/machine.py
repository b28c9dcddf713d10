"""Facts about the machine and the code that runs on it. Unknown facts are None, never a guess."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import torch

from .cores import usable_cores
from .paths import CLONE

# Environment variables with which a user makes libraries compute with other instructions, and round differently.
# NVIDIA's containers set the last two.
KERNELS_FROM_ENVIRONMENT = (
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"),
)
UNSET = "unset"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def unusable_accelerator() -> str | None:
    """Return one line about an accelerator that training cannot use, or None. It prevents silent training on the CPU.

    Apple's MPS is not reported: users of a Mac expect the CPU, and the output at the start names it.
    """
    # device_count() asks the driver by NVML, which also works with a driver that is too old for this PyTorch.
    if torch.cuda.device_count():
        return f"PyTorch {torch.__version__} cannot use this machine's GPUs: update their driver, or add --use_cpu"
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and accelerator.type != "mps":
        return f"{accelerator.type.upper()} devices are not supported, only CUDA GPUs: add --use_cpu"
    return None


def automatic_precision(use_cpu: bool, local_rank: int) -> str:
    """Return what `--precision auto` stands for on this rank's device: bf16 only if PyTorch need not emulate it.

    Emulated, it is slower than fp32. This creates no CUDA context.
    """
    if torch.cuda.is_available() and not use_cpu:
        is_native = bool(torch.version.hip) or torch.cuda.get_device_properties(local_rank).major >= 8
    else:
        is_native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if is_native else "fp32"


def use_deterministic_algorithms() -> None:
    """Make CUDA compute identical bits every time on the same hardware and library versions.

    Call it before the CUDA context and the NCCL communicator are created. PyTorch then raises for operations without a
    deterministic implementation, and selects deterministic attention and (unless NCCL_ALGO is set) all-reduce.
    """
    # Trainer's full_determinism would do the same for only one path, and add CUDA_LAUNCH_BLOCKING=1, which serializes
    # every kernel and is not needed for any operation here. cuBLAS is deterministic with a workspace of fixed size.
    # The size itself is fixed as well, because another one may select other algorithms.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    # PyTorch would also fill every new tensor with NaN, to show reads of memory that nothing has written. No result
    # depends on it, and each fill is a kernel.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def git_commit() -> str | None:
    """Return the commit of the running code, with `+` if tracked files have changed; None outside a git checkout."""
    if CLONE is None:  # the folder of a wheel may be inside the repository of another project
        return None
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.check_output(command, cwd=CLONE, stderr=subprocess.DEVNULL, text=True, timeout=10).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def device_name(device: torch.device) -> str:
    """Return the GPU's name as the driver reports it, or `cpu` with the machine's architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()})"


Arithmetic = Mapping[str, Sequence[str]]  # the distinct values of each fact over all ranks of a job, sorted


def arithmetic(device: torch.device) -> dict[str, str]:
    """Return the facts, by name, that decide how a device rounds, besides library versions and threads."""
    facts = {name: value or UNSET for name, value in kernels().items()}
    if device.type == "cuda":
        del facts["cpu"], facts["instructions"]
    return {"device": device_name(device)} | facts


def describe_mixed(facts: Arithmetic) -> str | None:
    """Name the facts in which the ranks of a job differ; None if they agree."""
    mixed = ", ".join(f"{name} ({', '.join(values)})" for name, values in facts.items() if len(values) > 1)
    return f"the ranks differ in {mixed}: results depend on which rank computes which rows" if mixed else None


def cpu_name() -> str:
    """Return the CPU's name and numbers as Linux reports them; if there are none, the machine's architecture."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace")
        facts = dict(re.findall(r"^(model name|cpu family|model)\s*:\s*(\S.*?)\s*$", lines, re.MULTILINE))
        if "model name" in facts:  # on virtual machines, CPUs of one name may round differently
            return ", ".join([facts.pop("model name"), *(f"{key} {facts[key]}" for key in sorted(facts))])
    return platform.machine()


def kernels() -> dict[str, str | None]:
    """Return the facts, by name, on which the choice of kernels, and with it rounding, depends."""
    return {
        "cpu": cpu_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "fp32_matmul_precision": torch.get_float32_matmul_precision(),  # `highest`, unless TF32 has been enabled
        **{name: os.environ.get(name) for name in KERNELS_FROM_ENVIRONMENT},
    }


def describe_machine(device: torch.device) -> dict[str, str]:
    """Return facts about the machine and the code that a measured time depends on, by name."""
    names = [device_name(device)] if device.type == "cuda" else []
    commit = git_commit() or "unknown"
    return {
        "machine": ", ".join([*names, cpu_name(), f"{len(usable_cores())} CPU cores"]),
        "PyTorch": torch.__version__,
        "commit": commit[:12] + commit[40:],  # with the mark of uncommitted changes
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: allocated on the GPU, or resident in main memory for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
