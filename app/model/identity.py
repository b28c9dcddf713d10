"""The content of a model: the weights in its files, its classes, and what else a resumed run compares."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import PretrainedConfig, PreTrainedModel

from ..common.errors import UserError, list_names

# These keys of a config name a place, the version that has written it, and a class that is not used.
WITHOUT_EFFECT = ("_name_or_path", "transformers_version", "architectures")
# The weights of heads that only pretraining needs, and of poolers, which not all classifiers have.
OF_PRETRAINING = re.compile(
    r"^(cls|lm_\w+|(\w+_)?predictions|generator_\w+|vocab_\w+|sop_classifier|decoder\.bias|final_logits_bias)\b|pooler"
)


def describe_config(config: PretrainedConfig) -> dict[str, Any]:
    """Return the content of a config in JSON types. Call it before a model is built, which may fill in values."""
    # A model's own config class may hold any objects. JSON has no infinity or NaN.
    return json.loads(json.dumps(config.to_dict(), default=str), parse_constant=str)  # type: ignore[no-any-return]


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


def check_only_head_is_new(name: str, model: PreTrainedModel, found: Mapping[str, Any]) -> list[str]:
    """Return the names of the head's weights that are new, because the files of a model have none that fit.

    Args:
        found: what `from_pretrained` returns with `output_loading_info`.

    Raises:
        UserError: A weight outside the head is new. It would be random.
    """
    problems = dict.fromkeys(found["missing_keys"], "are missing")
    for weight, in_file, in_model in found["mismatched_keys"]:
        problems[weight] = f"have the shape {[*in_file]} instead of {[*in_model]}"
    weights = [weight for weight, _ in model.named_parameters()]
    new = [weight for weight in weights if weight in problems]
    for weight in new:
        # A pooler is part of the head: models that were trained to predict masked tokens have none.
        if (weight.startswith(f"{model.base_model_prefix}.") and "pooler" not in weight) or new == weights:
            hint = f", but there are {unused}" if (unused := unused_weights(found)) else ""
            raise UserError(f"--model {name}: the weights {weight} {problems[weight]}{hint}")
    return new


def unused_weights(found: Mapping[str, Any]) -> str | None:
    """Return the first weight in the files that the classifier lacks, and how many follow; None without one."""
    names = [name for name in sorted(found["unexpected_keys"]) if not OF_PRETRAINING.search(name)]
    return f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}" if names else None


def trained_classes(config: PretrainedConfig, folder: str) -> list[str]:
    """Return the class names of a model's head: those in `id2label` or, if these are only defaults, in `label2id`.

    transformers writes such a file if a model was loaded with `label2id` alone, and may replace `label2id` when it
    reads one without `id2label`.
    """
    id2label: Any = config.id2label
    names = [str(id2label[index]) for index in sorted(id2label)]
    ids: dict[str, Any] = PretrainedConfig.get_config_dict(folder)[0].get("label2id") or {}
    has_names = any(name != f"LABEL_{index}" for index, name in enumerate(names))
    if has_names or not ids or sorted(map(str, ids.values())) != sorted(map(str, range(len(ids)))):
        return names
    return sorted(ids, key=lambda name: ids[name])


@torch.no_grad()
def match_classes(model: PreTrainedModel, trained: Sequence[str], class_names: Sequence[str]) -> str:
    """Permute the outputs of a trained head so that each class that it shares with the data keeps its output.

    Returns:
        A note on the classes of the head, unless each class of the data has its own output.
    """
    shared = {*trained} & {*class_names}
    before, now = ([n if n in shared else n.casefold() for n in names] for names in (trained, class_names))
    if before == now:
        return ""
    heads = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == len(now)]
    has_own_code = type(model).__module__.startswith("transformers_modules.")  # with any kind of head
    if len(heads) == 1 and not has_own_code and len(before) == len({*before}) == len({*now}) == len(now):
        others = iter([index for index, name in enumerate(before) if name not in now])
        order = [before.index(name) if name in before else next(others) for name in now]
        for parameter in heads[0].parameters():
            parameter.copy_(parameter[order])
        if {*before} == {*now}:
            return ""
    return f"; keeps its head, which was trained for the classes {list_names(trained)}"
