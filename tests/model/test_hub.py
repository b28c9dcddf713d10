"""Models are downloaded from a Hub, here a server of this test, and found again without a connection."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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
API = "/api/models/someone/model"


def hash_of(address: str) -> str:
    return hashlib.sha1(address.encode()).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """Serves the pages of one model."""

    pages: dict[str, bytes]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        address = self.path.partition("?")[0]
        content = self.pages.get(address, b"")
        self.send_response(200 if address in self.pages else 404)
        self.send_header("Content-Length", str(len(content)))
        if address not in self.pages:
            self.send_header("X-Error-Code", "RevisionNotFound" if address.startswith(API) else "RepoNotFound")
        elif "/resolve/" in address:
            self.send_header("X-Repo-Commit", address.split("/")[-2])
            self.send_header("ETag", hash_of(address))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET


def publish(branch: str, commit: str) -> None:
    """Let a branch refer to a commit."""
    info = json.dumps({"_id": "1", "id": "someone/model", "sha": commit, "siblings": []}).encode()
    Hub.pages |= dict.fromkeys((f"{API}/revision/{branch}", *([API] if branch == "main" else [])), info)


@pytest.fixture(params=["model.safetensors", "pytorch_model.bin"])
def hub(request, tmp_path, monkeypatch) -> Iterator[ThreadingHTTPServer]:
    """A Hub with commits of different weights on its branches `main` and `branch`, and an empty cache."""
    Hub.pages = {}
    for branch, commit in {"main": MAIN, "branch": BRANCH, MAIN: MAIN, BRANCH: BRANCH}.items():
        publish(branch, commit)
    for commit, bias in BIASES.items():
        folder = write_model(tmp_path / commit, "bert")
        (folder / "unneeded").touch()
        model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder))
        model.classifier.bias.data.fill_(bias)
        save = save_file if request.param == "model.safetensors" else torch.save
        save(model.state_dict(), folder / request.param)
        files = {f"/someone/model/resolve/{commit}/{file.name}": file.read_bytes() for file in folder.iterdir()}
        tree = [
            {"type": "file", "path": address.rpartition("/")[2], "size": len(content), "oid": hash_of(address)}
            for address, content in files.items()
        ]
        Hub.pages |= files | {f"{API}/tree/{commit}": json.dumps(tree).encode()}
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
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
    settings = settings_of(commit or revision)
    loaded = load_classifier(settings, ["0", "1"], load_tokenizer(settings, []))
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
    publish("main", BRANCH)
    assert commit_of_weights(commit) == commit == MAIN
    assert resolve_commit(settings_of()) == BRANCH


def test_only_a_model_on_the_hub_has_revisions(tmp_path):
    for model in ("tiny", str(write_model(tmp_path / "model", "bert"))):
        with pytest.raises(UserError, match=r"is not on the Hub, so it has no revisions$"):
            resolve_commit(settings_of("main", model))
