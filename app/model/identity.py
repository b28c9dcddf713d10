"""The content of a model: its weights, and what else it consists of, by which a resumed run detects a change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import PretrainedConfig

# These keys of a config name a place, the version that has written it, and a class that is not used.
WITHOUT_EFFECT = ("_name_or_path", "transformers_version", "architectures")


def describe_config(config: PretrainedConfig) -> dict[str, Any]:
    """Return the content of a config in JSON types. Call it before a model is built, which may fill in values."""
    # A model's own config class may hold any objects. JSON has no infinity or NaN.
    content: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str), parse_constant=str)
    return content


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the keys of two configs that affect the model and differ."""
    names = (before.keys() | now.keys()) - set(WITHOUT_EFFECT)
    if before.get("transformers_version") != now.get("transformers_version"):
        names &= before.keys() & now.keys()  # another version of the library may have added or removed defaults
    return [name for name in sorted(names) if before.get(name) != now.get(name)]


def hash_code(model: str, trust_remote_code: bool) -> str | None:
    """Return the SHA-256 of the Python files in a local model folder; None if they are not run."""
    if not trust_remote_code or not Path(model).is_dir():
        return None
    files = {str(path.relative_to(model)): path.read_bytes() for path in sorted(Path(model).rglob("*.py"))}
    return hashlib.sha256(repr(files).encode()).hexdigest()


def hash_weights(model: torch.nn.Module) -> str:
    """Return the SHA-256 of model.safetensors, as `save_pretrained` would write it, without writing it."""
    return hashlib.sha256(safetensors.torch.save(model.state_dict(), {"format": "pt"})).hexdigest()
