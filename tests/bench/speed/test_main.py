"""What the benchmark refuses before it measures anything."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
from helpers.worlds import fake_world

from app.bench.speed.__main__ import check, check_memory
from app.common.errors import UserError
from app.settings import Settings


def test_recipes_that_do_not_fit_into_memory_are_refused(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30))
    world = fake_world(size=2)
    check_memory(2**20, 32, world)
    with pytest.raises(
        UserError, match=r"of 33 recipes need 1\.03 GiB on this node, and 1 GiB are available: .*--recipes"
    ):
        check_memory(2**20, 33, world)


def test_settings_that_contradict_the_recipes_are_refused():
    check(Settings())
    with pytest.raises(UserError, match="--precision bf16: each recipe has its own: select them with --recipes"):
        check(Settings(precision="bf16"))
    with pytest.raises(UserError, match="--resume_from_checkpoint: a benchmark trains from the beginning"):
        check(Settings(resume_from_checkpoint="auto"))
