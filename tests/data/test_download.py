"""Downloading the real CSV, from servers that misbehave in various ways."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from helpers.jobs import PROJECT

from app.common.terminal import as_interrupt
from app.data import download
from app.program import run_program

CONTENT = ("label,review\n" + "1,很好，还会再来\n0,太吵了\n" * 10_000).encode()


class Mirror(BaseHTTPRequestHandler):
    """Serves the pages `SENT`; otherwise 404."""

    SENT: ClassVar = {"/right": CONTENT, "/wrong": CONTENT[::-1], "/truncated": CONTENT[:-5000], "/hangs": b"label"}
    hangs, released = threading.Event(), threading.Event()

    def do_GET(self):
        self.send_response(200 if self.path in self.SENT else 404)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(self.SENT.get(self.path, b""))
        if self.path == "/hangs":
            self.hangs.set()
            self.released.wait(30)

    def log_message(self, *_):
        pass


@pytest.fixture
def mirror(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Mirror.hangs.clear(), Mirror.released.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        Mirror.released.set()
        server.shutdown()


@pytest.fixture
def output(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(download, "DOWNLOADED_CSV", tmp_path / "data" / "reviews.csv")
    (tmp_path / "data").mkdir()
    return download.DOWNLOADED_CSV


def run(url, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["download", "--url", url])
    return run_program(download.main)


def test_the_expected_file_is_downloaded_and_only_once(mirror, output, monkeypatch, capsys):
    assert run(mirror.url + "/right", monkeypatch) == 0
    mirror.shutdown()
    mirror.server_close()
    assert run(mirror.url + "/right", monkeypatch) == 0
    assert capsys.readouterr().out == f"{output}: downloaded and verified\n" * 2
    assert output.read_bytes() == CONTENT
    assert output.stat().st_mode & 0o777 == 0o644
    assert [*output.parent.iterdir()] == [output]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("MIRROR/wrong", "does not match the known hash"),
        ("MIRROR/truncated", "IncompleteRead|does not match"),
        ("MIRROR/hangs", "timed out"),
        ("MIRROR/none", "404"),
        ("http://127.0.0.1:1/right", "refused"),  # no server has this port
        *((url, "") for url in ("ftp://host/f", "file.csv", "", "http://", "http://[::1", "http://h:x/")),
    ],
)
def test_a_failed_download_is_one_line_and_leaves_nothing(mirror, output, monkeypatch, capsys, url, message):
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.2)
    assert run(url.replace("MIRROR", mirror.url), monkeypatch) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(f"{message}.*--url", line)
    assert list(output.parent.iterdir()) == []


def test_the_hash_is_that_of_the_real_file(real_csv):
    assert hashlib.sha256(real_csv.read_bytes()).hexdigest() == download.SHA256


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_a_download_leaves_no_file(mirror, output, number):
    start = (
        "import sys; from pathlib import Path; from app.data import download; from app.program import run_program; "
        f"download.DOWNLOADED_CSV = Path({str(output)!r}); sys.exit(run_program(download.main))"
    )
    command = [sys.executable, "-c", start, "--url", mirror.url + "/hangs"]
    with subprocess.Popen(command, cwd=PROJECT, stderr=subprocess.PIPE, text=True) as process:
        assert Mirror.hangs.wait(60)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.splitlines()[-1].startswith("interrupted")
    assert list(output.parent.iterdir()) == []


def test_an_ignored_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with as_interrupt(signal.SIGHUP):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
