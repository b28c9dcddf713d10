"""Models are downloaded from a Hub, here a server of this test, and found again without a connection."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from helpers.architectures import write_model
from helpers.jobs import PROJECT
from helpers.marks import slow_after
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

COMMIT = "c" * 40
LOAD = """
import sys
from app.model.hub import resolve_commit
from app.model.load import load_classifier, load_tokenizer
from app.settings import Settings
settings = Settings(model=sys.argv[1], max_length=16)
try:
    commit = resolve_commit(settings)
    loaded = load_classifier(settings, ["0", "1"], load_tokenizer(settings, [], commit), commit=commit)
    print(commit, float(loaded.model.classifier.weight.sum()))
except ValueError as problem:
    print(problem)
"""


class Hub(BaseHTTPRequestHandler):
    """Serves the files of a folder as the model `someone/model`."""

    folder: Path

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, headers = self.path.partition("?")[0], {"X-Repo-Commit": COMMIT}
        files = {file.name: file for file in self.folder.iterdir()}
        hashes = {name: hashlib.sha1(name.encode()).hexdigest() for name in files}
        if path.startswith("/api/models/someone/model/tree/"):
            names = [{"type": "file", "path": n, "size": files[n].stat().st_size, "oid": hashes[n]} for n in files]
            content = json.dumps(names).encode()
        elif path.startswith("/api/models/someone/model"):
            content = json.dumps({"_id": "1", "id": "someone/model", "sha": COMMIT, "siblings": []}).encode()
        elif (name := path.removeprefix(f"/someone/model/resolve/{COMMIT}/")) in files:
            content, headers["ETag"] = files[name].read_bytes(), f'"{hashes[name]}"'
        else:
            content, headers["X-Error-Code"] = b"", "RepoNotFound"
        self.send_response(404 if "X-Error-Code" in headers else 200)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path) -> Iterator[ThreadingHTTPServer]:
    Hub.folder = write_model(tmp_path / "served", "bert")
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("kind", slow_after(1, ["model.safetensors", "pytorch_model.bin"]))
def test_a_model_is_downloaded_once_and_then_found_without_a_connection(hub, tmp_path, kind):
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(Hub.folder))
    (save_file if kind.endswith("s") else torch.save)(model.state_dict(), Hub.folder / kind)
    (Hub.folder / "optimizer.bin").write_text("not needed")
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }

    def load(name: str) -> str:
        command = [sys.executable, "-c", LOAD, name]
        return subprocess.check_output(command, cwd=PROJECT, env=environment, text=True, timeout=300).strip()

    expected = f"{COMMIT} {model.classifier.weight.sum().item()}"
    assert load("someone/model") == expected
    assert "no such model on the Hub" in load("someone/none")
    assert not list(tmp_path.glob("home/**/optimizer.bin"))
    hub.shutdown()
    hub.server_close()
    assert load("someone/model") == expected
    assert load("someone/none").endswith("the Hub cannot be reached, and the model is not in the local cache")
