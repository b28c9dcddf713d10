"""Files of a model on the Hub, pinned to one commit, or of a local folder."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError
from transformers.utils import CONFIG_NAME

from app.errors import UserError
from app.settings import TINY, ModelSettings


def resolve_commit(settings: ModelSettings) -> str | None:
    """Resolve `--model` and `--revision` to the hash of a commit on the Hub.

    A branch such as `main` can move between two requests: resolve it once and load every file from that commit.

    Returns:
        The hash, or None for a local folder and for `tiny`. Without a connection it is that of the local cache.

    Raises:
        UserError: no such model or revision, `--revision` without a model of the Hub, or the Hub can't be reached and
            the model is not in the local cache.
    """
    if settings.model != TINY:
        _check_folder(settings.model)
    if settings.model == TINY or Path(settings.model).is_dir():
        if settings.revision is not None:
            raise UserError(f"--revision {settings.revision}: only models on the Hub have one, not {settings.model}")
        return None
    commit = _hub_commit(settings.model, settings.revision)
    if commit is not None:
        return commit
    config = try_to_load_from_cache(settings.model, CONFIG_NAME, revision=settings.revision)
    if not isinstance(config, str):
        raise UserError(f"--model {settings.model}: {NOT_CACHED}")
    return Path(config).parent.name  # the cache's layout: snapshots/<commit>/config.json


def _check_folder(model: str) -> None:
    """A name that can only mean a local folder must be one: the Hub would answer with something about repo ids."""
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"--model {model}: the folder has no config.json, so it is no model")
    elif path.exists():
        raise UserError(f"--model {model}: is a file; must be a folder, a name on the Hub, or `{TINY}`")
    elif model.startswith((".", "/", "~")) or model.count("/") > 1 or not model.strip():
        raise UserError(f"--model {model}: no such folder")


def _fetch(auto_class: Any, settings: ModelSettings, commit: str | None, **more: Any) -> Any:
    is_folder = Path(settings.model).is_dir()
    offline = not is_folder and _hub_commit(settings.model, settings.revision) is None
    if not is_folder:
        more["revision"] = commit or settings.revision or "main"
    try:
        return auto_class.from_pretrained(
            settings.model, trust_remote_code=settings.trust_remote_code, local_files_only=offline, **more
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as problem:
        # Hub errors subclass OSError; an unknown architecture or one without this head is a ValueError or KeyError.
        what = NOT_CACHED if offline else "can't be loaded: " + _first_line(problem)
        raise UserError(f"--model {settings.model}: {what}") from None


NOT_CACHED = "the Hub can't be reached, and the model is not in the local cache"


@cache
def _hub_commit(name: str, revision: str | None) -> str | None:
    """The commit of a model on the Hub; None where the Hub doesn't answer.

    One try and at most 10 seconds: transformers alone would try six times per file, for a minute, and log each try.
    """
    try:
        return HfApi().model_info(name, revision=revision, timeout=10).sha
    except RevisionNotFoundError:
        raise UserError(f"--revision {revision}: {name} has no such branch, tag or commit") from None
    except RepositoryNotFoundError:
        raise UserError(f"--model {name}: no such model on the Hub (or it is private: `hf auth login` first)") from None
    except HFValidationError:
        raise UserError(f"--model {name}: no folder, no name on the Hub, and not `{TINY}`") from None
    except Exception:  # the HTTP library's own errors: another one with each version of huggingface_hub
        return None


def _first_line(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return lines[0] if lines else type(problem).__name__
