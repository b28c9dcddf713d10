"""Peak FLOP/s: looked up by exact name, or measured."""

from __future__ import annotations

import platform
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.common import machine
from app.common.machine import DATA_SHEETS, automatic_precision, measure_peak_flops, peak_flops
from app.program import select_precision
from app.settings import Settings


@pytest.mark.parametrize(
    ("name", "bf16", "fp16", "fp32"),
    [
        ("NVIDIA H200", 989.5e12, 989.5e12, 67e12),
        ("NVIDIA H200 NVL", 835.5e12, 835.5e12, 60e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12, 989.5e12, 67e12),
        ("NVIDIA H100 NVL", 835.5e12, 835.5e12, 60e12),
        ("NVIDIA H100 PCIe", 756.5e12, 756.5e12, 51e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 312e12, 19.5e12),
        ("NVIDIA A100-PCIE-40GB", 312e12, 312e12, 19.5e12),
        ("NVIDIA A10", 125e12, 125e12, 31.2e12),
        ("NVIDIA L4", 121e12, 121e12, 30.3e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 165.2e12, 82.6e12),
        ("Tesla T4", None, 65e12, 8.1e12),
        ("Tesla V100-SXM2-32GB", None, 125e12, 15.7e12),
        ("Tesla V100-PCIE-16GB", None, 112e12, 14e12),
    ],
)
def test_a_listed_gpu_has_the_dense_peak_of_its_data_sheet(name, bf16, fp16, fp32):
    assert peak_flops(name, "bf16") == bf16
    assert peak_flops(name, "fp16") == fp16
    assert peak_flops(name, "fp32") == fp32
    assert peak_flops(name, "tf32") == (bf16 and bf16 / 2)
    assert peak_flops(name, "fp64") is None


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H200 MIG 7g.141gb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb"),
        *("NVIDIA A100X", "NVIDIA A800-SXM4-80GB", "NVIDIA H800", "NVIDIA H20", "NVIDIA H100 64GB HBM2"),
        *("NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e", "GRID A100-10C", "NVIDIA H100L-94C", "NVIDIA GB200"),
        *("", "cpu (x86_64)", "NVIDIA A100", "NVIDIA A10G", "NVIDIA L40", "Tesla T40", "NVIDIA T4"),
    ],
)
def test_a_gpu_that_only_resembles_a_listed_one_has_no_peak(name):
    assert peak_flops(name, "bf16") is None
    assert peak_flops(name, "fp32") is None


@given(st.sampled_from(sorted(DATA_SHEETS)), st.text(max_size=12), st.text(max_size=12))
def test_no_other_name_has_a_peak(name, before, after):
    other = before + name + after
    if other not in DATA_SHEETS:
        assert peak_flops(other, "bf16") is None
    if before not in DATA_SHEETS:
        assert peak_flops(before, "fp32") is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_a_measured_peak_is_plausible_and_leaves_the_random_state_alone(device, precision):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    peak = measure_peak_flops(torch.device(device), precision)
    assert 1e7 < peak < 3e15  # a core with matrix instructions reaches 1e13
    assert torch.equal(torch.get_rng_state(), before)
    listed = peak_flops(torch.cuda.get_device_name(), precision) if device == "cuda" else None
    assert listed is None or 0.3 * listed < peak < 1.05 * listed


def test_the_cpu_has_the_name_that_linux_reports_and_otherwise_its_architecture(tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "Path", lambda _: file)
    assert machine.cpu_name() == platform.machine(), "there is no such file"
    file.write_text("processor\t: 0\nmodel name\t: A CPU: 2 GHz\nflags\t: fpu\n")
    assert machine.cpu_name() == "A CPU: 2 GHz"
    monkeypatch.setattr(machine, "usable_cores", lambda: {3, 5})
    assert machine.describe_machine(torch.device("cpu"))["machine"] == "A CPU: 2 GHz, 2 CPU cores"


@pytest.mark.parametrize(
    ("avx512", "amx", "expected"), [(True, False, "bf16"), (False, True, "bf16"), (False, False, "fp32")]
)
def test_automatic_precision_on_a_cpu_is_bf16_only_if_it_has_instructions_for_it(monkeypatch, avx512, amx, expected):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert automatic_precision(use_cpu=True, local_rank=0) == expected
    assert select_precision(Settings(precision="auto", use_cpu=True)).precision == expected
    assert select_precision(Settings(precision="fp16", use_cpu=True)).precision == "fp16"


@pytest.mark.parametrize(("major", "expected"), [(7, "fp32"), (8, "bf16"), (9, "bf16")])
def test_automatic_precision_on_a_gpu_is_that_of_this_ranks_device(monkeypatch, major, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    devices = {1: SimpleNamespace(major=major)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)
    assert automatic_precision(use_cpu=False, local_rank=1) == expected
