"""Load a model's files from one commit on the Hub, or from a local folder."""

from __future__ import annotations

import json
import pickle
import re
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from ..common.errors import UserError, shorten
from ..setting_groups import BUILT_IN, ModelSettings

INDEXES = (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)
JSON_FILES = (CONFIG_NAME, TOKENIZER_CONFIG_FILE, *INDEXES)
NAMES = ", ".join(BUILT_IN)
NOT_CACHED = "the Hub cannot be reached, and the model is not in the local cache"


def resolve_commit(settings: ModelSettings) -> str | None:
    """Return the commit of `--model` and `--revision` on the Hub; None for a local folder and for a built-in model.

    A branch such as `main` can move between two requests, so it is resolved once and every file is loaded from that
    commit. Without a connection, it is resolved from the local cache.

    Raises:
        UserError: There is no such model or revision, `--revision` is given for a model that is not on the Hub, or the
            Hub cannot be reached and the model is not in the local cache.
    """
    if settings.model not in BUILT_IN:
        check_folder(settings.model)
    if settings.model in BUILT_IN or Path(settings.model).is_dir():
        if settings.revision is not None:
            raise UserError(
                f"--revision {settings.revision}: {settings.model} is not a model on the Hub, so it has no revisions"
            )
        return None
    commit = _hub_commit(settings.model, settings.revision)
    if commit is not None:
        return commit
    config = try_to_load_from_cache(settings.model, CONFIG_NAME, revision=settings.revision)
    if not isinstance(config, str):
        raise UserError(f"--model {settings.model}: {NOT_CACHED}")
    return Path(config).parent.name  # layout of the cache: snapshots/<commit>/config.json


def check_folder(model: str) -> None:
    """Check that a name that can only mean a local folder, which the Hub would call invalid, is a model folder.

    Raises:
        UserError: It is not a model folder.
    """
    path = Path(model)
    try:
        is_folder = path.is_dir()
    except OSError as problem:  # such as a name that is too long
        raise UserError(f"--model {shorten(model)}: {problem.strerror}") from None
    if is_folder:
        if not (path / CONFIG_NAME).is_file():
            raise UserError(f"--model {model}: is not a model folder, because it has no {CONFIG_NAME}")
        for name in JSON_FILES:
            if (path / name).is_file():
                _check_json(model, name)
    elif path.exists():
        raise UserError(f"--model {model}: is a file; must be a folder, a model name on the Hub, or one of {NAMES}")
    elif model.startswith((".", "/", "~")) or model.count("/") > 1 or not model.strip():
        raise UserError(f"--model {model}: no such folder")


def _check_json(model: str, name: str) -> None:
    """Check that a file is a JSON object, and that an index names the files that hold the weights."""
    try:
        content = json.loads(Path(model, name).read_text(encoding="utf-8"))
    except OSError as problem:
        raise UserError(f"--model {model}: {name} cannot be read: {problem.strerror}") from None
    except ValueError as problem:
        raise UserError(f"--model {model}: {name} is not valid JSON: {problem}") from None
    except RecursionError:
        raise UserError(f"--model {model}: {name} is nested too deeply") from None
    if not isinstance(content, dict):
        raise UserError(f"--model {model}: {name} must be a JSON object, not a {type(content).__name__}")
    if name in INDEXES and not (isinstance(content.get("weight_map"), dict) and content["weight_map"]):
        raise UserError(f"--model {model}: {name} names no weights: its weight_map must map each weight to a file")


def fetch(auto_class: Any, settings: ModelSettings, commit: str | None, **kwargs: Any) -> Any:
    """Call `from_pretrained` of an Auto class, such as `AutoTokenizer`, for the model of the settings.

    Raises:
        UserError: The model cannot be loaded.
    """
    check_folder(settings.model)
    is_folder = Path(settings.model).is_dir()
    offline = not is_folder and _hub_commit(settings.model, settings.revision) is None
    if not is_folder:
        kwargs["revision"] = commit or settings.revision or "main"
    try:
        return auto_class.from_pretrained(
            settings.model, trust_remote_code=settings.trust_remote_code, local_files_only=offline, **kwargs
        )
    except Exception as problem:
        # The Hub, an unknown architecture, one without this head and each kind of damaged file raise other exceptions.
        if isinstance(problem, UserError | MemoryError):
            raise
        what = {"AutoConfig": "config", "AutoTokenizer": "tokenizer"}.get(auto_class.__name__, "model")
        reason = NOT_CACHED if offline else f"its {what} cannot be loaded: {_reason(problem)}"
        raise model_error(settings, problem, reason) from None


def model_error(settings: ModelSettings, problem: Exception, reason: str) -> UserError:
    """Return the error that names the flag to change: the model, or an attention implementation that it cannot use."""
    if settings.attn_implementation and re.search("Flash ?Attention|attention implementation", str(problem)):
        sentence = first_line(problem).partition(". ")[0]  # the others ask to open an issue
        return UserError(f"--attn_implementation {settings.attn_implementation}: {sentence}")
    return UserError(f"--model {settings.model}: {reason}")


def _reason(problem: Exception) -> str:
    if isinstance(problem, pickle.UnpicklingError | EOFError):  # their own messages advise to run the code in the file
        return f"{WEIGHTS_NAME} (or a part of it) is damaged, or holds more than weights"
    line, name = first_line(problem), type(problem).__name__
    # Most of the messages of Python's own errors, such as KeyError, need the name of the error.
    return line if isinstance(problem, OSError | ValueError | ImportError) or line == name else f"{name}: {line}"


@cache
def _hub_commit(name: str, revision: str | None) -> str | None:
    """Return the commit of a model on the Hub, or None if the Hub cannot be reached.

    There is one attempt of at most 10 seconds. transformers would make six attempts per file, for a minute, and log
    each of them.
    """
    try:
        return HfApi().model_info(name, revision=revision, timeout=10).sha
    except RevisionNotFoundError:
        raise UserError(f"--revision {revision}: {name} has no such branch, tag or commit") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"--model {name}: no such model on the Hub (if it is private, run `hf auth login` first)"
        ) from None
    except HFValidationError:
        raise UserError(f"--model {name}: must be a local folder, a model name on the Hub, or one of {NAMES}") from None
    except Exception:  # errors of the HTTP library, which differ between versions of huggingface_hub
        return None


def first_line(problem: Exception) -> str:
    """Return the first line of an exception's message, with the second one after a colon, or the exception's type."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [type(problem).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
