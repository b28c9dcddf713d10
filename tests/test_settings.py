"""Validation of settings."""

from __future__ import annotations

import os

import pytest

from app.errors import UserError
from app.settings import Settings


@pytest.mark.parametrize("name", ["model", "output_dir", "resume_from_checkpoint"])
def test_a_path_that_is_not_utf8_is_rejected(name):
    with pytest.raises(UserError, match=f"--{name} .*must be valid UTF-8"):
        Settings(**{name: os.fsdecode(b"runs/x\xffy")})
    Settings(**{name: "runs/酒店\n\\é"})
