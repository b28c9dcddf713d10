"""Models are downloaded from a Hub, here a server of this test, and found again without a connection."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.architectures import write_model
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from app.common.errors import UserError
from app.model.hub import resolve_commit
from app.model.load import load_classifier, load_tokenizer
from app.settings import Settings

MAIN, BRANCH = "a" * 40, "b" * 40
BIASES = {MAIN: 1.0, BRANCH: 2.0}  # of the classifiers
ADDRESS = "/someone/model"


class Hub(BaseHTTPRequestHandler):
    """Serves the folders of commits as the model `someone/model`."""

    folder: Path
    branches: dict[str, str]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        content, headers = self.answer(self.path.partition("?")[0])
        self.send_response(404 if "X-Error-Code" in headers else 200)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def answer(self, path: str) -> tuple[bytes, dict[str, str]]:
        """Return the content and the headers for the address of a model, of its list of files, or of a file."""
        if not path.removeprefix("/api/models").startswith(ADDRESS):
            return b"", {"X-Error-Code": "RepoNotFound"}
        _, kind, revision, *names = [*path.removeprefix("/api/models").removeprefix(ADDRESS).split("/"), "", "main"][:4]
        commit = self.branches.get(revision, revision)
        files = {file.name: file for file in self.folder.glob(f"{commit}/*")}
        if not files:
            return b"", {"X-Error-Code": "RevisionNotFound"}
        hashes = {name: hashlib.sha1(f"{commit}{name}".encode()).hexdigest() for name in files}
        if kind == "resolve" and names[0] in files:
            headers = {"X-Repo-Commit": commit, "ETag": f'"{hashes[names[0]]}"'}
            return files[names[0]].read_bytes(), headers
        if kind == "resolve":
            return b"", {"X-Error-Code": "EntryNotFound"}
        answer: Any = {"_id": "1", "id": "someone/model", "sha": commit, "siblings": []}
        if kind == "tree":
            answer = [{"type": "file", "path": n, "size": files[n].stat().st_size, "oid": hashes[n]} for n in files]
        return json.dumps(answer).encode(), {}


@pytest.fixture(params=["model.safetensors", "pytorch_model.bin"])
def hub(request, tmp_path, monkeypatch) -> Iterator[ThreadingHTTPServer]:
    """A Hub with commits of different weights on its branches `main` and `branch`, and an empty cache."""
    Hub.folder, Hub.branches = tmp_path / "served", {"main": MAIN, "branch": BRANCH}
    for commit, bias in BIASES.items():
        folder = write_model(Hub.folder / commit, "bert")
        (folder / "unneeded").touch()
        model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder))
        model.classifier.bias.data.fill_(bias)
        save = save_file if request.param == "model.safetensors" else torch.save
        save(model.state_dict(), folder / request.param)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        constants = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
        url = address + "/{repo_id}/resolve/{revision}/{filename}"
        constants |= {"ENDPOINT": address, "HUGGINGFACE_CO_URL_TEMPLATE": url}
        for name, value in constants.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        yield server
        server.shutdown()


def settings_of(revision: str | None = None, model: str = "someone/model") -> Settings:
    return Settings(model=model, revision=revision, max_length=16)


def commit_of_weights(commit: str | None, revision: str | None = None) -> str:
    """Return the commit whose weights are loaded."""
    settings = settings_of(revision)
    loaded = load_classifier(settings, ["0", "1"], load_tokenizer(settings, [], commit), commit=commit)
    (commit,) = (commit for commit, bias in BIASES.items() if (loaded.model.classifier.bias == bias).all())
    return commit


def assert_that_branches_are_found() -> None:
    for revision, commit in ((None, MAIN), ("branch", BRANCH)):
        assert resolve_commit(settings_of(revision)) == commit
        assert commit_of_weights(commit, revision) == commit


def test_a_model_is_downloaded_once_and_then_found_without_a_connection(hub, tmp_path):
    assert_that_branches_are_found()
    assert not list(tmp_path.glob("cache/**/unneeded")), "only files that are needed are downloaded"
    with pytest.raises(UserError, match="no such model on the Hub"):
        resolve_commit(settings_of(model="someone/none"))
    with pytest.raises(UserError, match=r"^--revision no-such: someone/model has no such branch, tag or commit$"):
        resolve_commit(settings_of("no-such"))
    hub.shutdown()
    hub.server_close()
    assert_that_branches_are_found()
    with pytest.raises(UserError, match=r"the Hub cannot be reached, and the model is not in the local cache$"):
        resolve_commit(settings_of(model="someone/none"))


def test_a_branch_that_moves_between_two_requests_has_no_effect(hub):
    commit = resolve_commit(settings_of())
    Hub.branches["main"] = BRANCH
    assert commit_of_weights(commit) == commit == MAIN
    assert resolve_commit(settings_of()) == BRANCH


def test_only_a_model_on_the_hub_has_revisions(tmp_path):
    for model in ("tiny", str(write_model(tmp_path / "model", "bert"))):
        with pytest.raises(UserError, match=r"is not a model on the Hub, so it has no revisions$"):
            resolve_commit(settings_of("main", model))
