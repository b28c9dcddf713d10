"""Settings that a part of a program does not use."""

from __future__ import annotations

import pytest

from app.common.errors import UserError
from app.flags import reject_unused
from app.settings import Settings


@pytest.mark.parametrize("model", ["tiny", "tiny-bert"])
def test_the_default_model_of_a_program_is_no_change(model):
    reject_unused(Settings(model=model), ["seed"], "here", model=model)
    reject_unused(Settings(model=model, seed=1), ["seed", "max_length"], "here", model=model)
    with pytest.raises(UserError, match=r"^--seed=1: has no effect here$"):
        reject_unused(Settings(model=model, seed=1), ["model"], "here", model=model)


@pytest.mark.parametrize("model", ["tiny", "tiny-bert", "org/name"])
def test_another_model_is_rejected_unless_it_is_used(model):
    for default in {"tiny", "tiny-bert"} - {model}:
        with pytest.raises(UserError, match=f"^--model={model}: has no effect here$"):
            reject_unused(Settings(model=model), ["seed"], "here", model=default)
        reject_unused(Settings(model=model), ["model"], "here", model=default)
