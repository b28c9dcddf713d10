"""The models that need no download, and the defaults that depend on the model."""

from __future__ import annotations

from typing import Any

TINY = "tiny"
TINY_BERT = "tiny-bert"
BUILT_IN = (TINY, TINY_BERT)

RECIPE: dict[str, Any] = {"max_length": 128, "num_train_epochs": 3.0}
RECIPE_OF_TINY: dict[str, Any] = {"max_length": 256, "num_train_epochs": 6.0}  # chosen by cross-validation


def recipe_of(model: str) -> dict[str, Any]:
    """Return the defaults of the settings that are None unless they are set."""
    return RECIPE_OF_TINY if model == TINY else RECIPE


def describe_default(name: str) -> str:
    """Describe a default that depends on the model, for `--help`."""
    return f"default: {RECIPE[name]:g}, for `{TINY}` {RECIPE_OF_TINY[name]:g}"
