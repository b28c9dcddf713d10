"""Facts about the machine."""

from __future__ import annotations

import pytest
import torch

from app.common import machine
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
