"""Find a model's files, in a local folder or of one commit on the Hub, and load from them."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, errors, snapshot_download
from huggingface_hub.file_download import REGEX_COMMIT_HASH
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import CONFIG_NAME, WEIGHTS_NAME

from ..common.errors import UserError, shorten
from ..setting_groups import BUILT_IN, ModelSettings

CONTENT = ("*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "*.txt")  # config, tokenizer and code
WEIGHTS = ("model*.safetensors*", "pytorch_model*.bin*")  # or the index of parts; the first kind is loaded
# from_pretrained reads the first of these kinds that a folder has.
KINDS_OF_WEIGHTS = ("model.safetensors", "model-*.safetensors", "pytorch_model.bin", "pytorch_model-*.bin")
# Weights of other formats or names.
UNREAD = ("*.h5", "*.msgpack", "*.ckpt*", "**/*.safetensors", "**/*model*.bin", "*.gguf", "*.pt*", "*.npz", "**/*.onnx")
OF_TOKENIZERS = ("*token*.json", "*vocab*", "*.model")  # without them, some tokenizers know no token, without an error
SECONDS = 10  # that the Hub has to answer: snapshot_download itself would wait for as long as the system does


def resolve_commit(settings: ModelSettings) -> str | None:
    """Return the commit of `--model` and `--revision` on the Hub; None for a local folder and for a built-in model.

    A branch such as `main` can move between two requests, so it is resolved once and every file is loaded from that
    commit. Without a connection, it is resolved from the local cache.
    """
    on_hub = settings.model not in BUILT_IN and not os.path.isdir(settings.model)
    if settings.revision is not None and not on_hub:
        raise UserError(f"--revision {settings.revision}: {settings.model} is not on the Hub, so it has no revisions")
    commit = Path(model_folder(settings)).name if on_hub else None  # the cache has a folder for each commit
    if settings.model not in BUILT_IN:
        fetch(AutoConfig, settings)  # raises a mistake before `compare` starts a job
    return commit


def model_folder(settings: ModelSettings, files: Sequence[str] = CONTENT) -> str:
    """Return the local folder that holds a model's files. Files on the Hub are downloaded into its cache.

    Args:
        settings: Their `revision` is the result of `resolve_commit` to load all files from one commit.
        files: Patterns of the files that are needed.

    Raises:
        UserError: The folder is no model folder, there is no such model or revision on the Hub, or the Hub cannot be
            reached and the model is not in the local cache.
    """
    name, revision = settings.model, settings.revision
    if os.path.exists(name):
        if not Path(name, CONFIG_NAME).is_file():
            raise UserError(f"--model {name}: is not a model folder, because it has no {CONFIG_NAME}")
        return name
    download = partial(snapshot_download, name, revision=revision, allow_patterns=list(files))
    try:
        if REGEX_COMMIT_HASH.match(revision or ""):
            with suppress(errors.LocalEntryNotFoundError):
                return download(local_files_only=True)
        HfApi().model_info(name, revision=revision, timeout=SECONDS)  # raises if it cannot be reached
        return download()  # by the name of a branch, which the cache then knows without a connection
    except errors.RevisionNotFoundError:
        raise UserError(f"--revision {revision}: {name} has no such branch, tag or commit") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        places = "no such folder, and no such model on the Hub (if it is private, run `hf auth login`)"
        raise UserError(f"--model {shorten(name, 200)}: {places}, nor {', '.join(BUILT_IN)}") from None
    except Exception as problem:  # errors of the HTTP library, which differ between versions of huggingface_hub
        try:
            return download(local_files_only=True)
        except errors.LocalEntryNotFoundError:
            reason = getattr(problem, "strerror", None)  # such as a full disk
            reason = reason or "no such folder; the Hub cannot be reached, and the model is not in the local cache"
            raise UserError(f"--model {name}: {reason}") from None


def fetch(auto_class: Any, settings: ModelSettings, **kwargs: Any) -> Any:
    """Call `from_pretrained` of an Auto class, such as `AutoTokenizer`, for the model of the settings.

    Raises:
        UserError: The model cannot be loaded.
    """
    folder = model_folder(settings)
    if Path(folder, "adapter_config.json").is_file():
        remedy = "save the model with peft's merge_and_unload, or remove the file if it is merged"
        raise UserError(f"--model {settings.model}: its adapter_config.json belongs to an adapter: {remedy}")
    for weights in WEIGHTS if auto_class is AutoModelForSequenceClassification else ():
        model_folder(settings, (*CONTENT, weights))
        if any(Path(folder).glob(weights)):
            break
    if auto_class is AutoTokenizer and not any(any(Path(folder).glob(name)) for name in OF_TOKENIZERS):
        raise UserError(f"--model {settings.model}: has no files of a tokenizer: save the model's tokenizer there")
    kwargs |= {"trust_remote_code": settings.trust_remote_code, "local_files_only": True}
    try:
        return auto_class.from_pretrained(folder, **kwargs)
    except Exception as problem:
        # An unknown architecture, one without this head and each kind of damaged file raise other exceptions.
        what = {"AutoConfig": "config", "AutoTokenizer": "tokenizer"}.get(auto_class.__name__, "model")
        raise UserError(f"--model {settings.model}: its {what} cannot be loaded: {explain(problem)}") from None


def explain(problem: Exception) -> str:
    """Return why a model cannot be loaded, and what to do if that is known."""
    if "trust_remote_code" in str(problem):
        return "it is Python code in its repository: --trust_remote_code runs it, so read it first"
    if "tiktoken" in str(problem):  # which transformers tries last: hardly any classifier has its files
        return "it needs the package sentencepiece: pip install sentencepiece"
    if isinstance(problem, pickle.UnpicklingError | EOFError):  # their own messages advise to run the code in the file
        return f"{WEIGHTS_NAME} (or a part of it) is damaged, or holds more than weights"
    line, name = first_line(problem), type(problem).__name__
    if re.search("Flash ?Attention|attention implementation", line):
        return f"choose another --attn_implementation: {line.partition(' yet. ')[0]}"
    # Most of the messages of Python's own errors, such as KeyError, need the name of the error.
    return line if isinstance(problem, OSError | ValueError | ImportError) or line == name else f"{name}: {line}"


def first_line(problem: Exception) -> str:
    """Return the first line of an exception's message, with the second one after a colon, or the exception's type."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [type(problem).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
