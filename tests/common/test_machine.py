"""Facts about the machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from app.common import machine
from app.common.machine import automatic_precision
from app.program import select_precision
from app.settings import Settings


def test_the_cpu_has_the_name_that_linux_reports(tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "Path", lambda _: file)
    file.write_text("processor\t: 0\nmodel name\t: A CPU: 2 GHz \nflags\t: fpu\n")
    assert machine.cpu_name() == "A CPU: 2 GHz"
    file.write_text("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: A CPU\nstepping\t: 1\n" * 2)
    assert machine.cpu_name() == "A CPU, cpu family 25, model 17"


@pytest.mark.parametrize(
    ("avx512", "amx", "expected"), [(True, False, "bf16"), (False, True, "bf16"), (False, False, "fp32")]
)
def test_automatic_precision_on_a_cpu_is_bf16_only_if_it_has_instructions_for_it(monkeypatch, avx512, amx, expected):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert select_precision(Settings(precision="auto", use_cpu=True)).precision == expected
    assert select_precision(Settings(precision="fp16", use_cpu=True)).precision == "fp16"


@pytest.mark.parametrize(("major", "expected"), [(7, "fp32"), (8, "bf16"), (9, "bf16")])
def test_automatic_precision_on_a_gpu_is_that_of_this_ranks_device(monkeypatch, major, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    devices = {1: SimpleNamespace(major=major)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)
    assert automatic_precision(use_cpu=False, local_rank=1) == expected
