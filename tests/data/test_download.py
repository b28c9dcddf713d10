"""Downloading the real CSV, from servers that misbehave in various ways."""

from __future__ import annotations

import hashlib
import os
import queue
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

    def do_GET(self):
        self.send_response(200 if self.path in self.SENT else 404)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(self.SENT.get(self.path, b""))
        self.server.requests.put(self.path)
        if self.path == "/hangs":
            self.server.released.wait(30)

    def log_message(self, *_):
        pass


@pytest.fixture
def mirror(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        server.requests, server.released = queue.SimpleQueue(), threading.Event()
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.released.set()
        server.shutdown()


@pytest.fixture
def output(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(download, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(download, "DOWNLOADED_CSV", tmp_path / "data" / "reviews.csv")
    return download.DOWNLOADED_CSV


@pytest.fixture
def run(monkeypatch, capsys):
    """Call `run(status, url)`: it returns what the program prints, which is one line."""

    def run(status, url):
        monkeypatch.setattr(sys, "argv", ["download", "--url", url])
        assert run_program(download.main) == status
        printed = capsys.readouterr()
        (line,) = (printed.err if status else printed.out).splitlines()
        return line

    return run


def test_the_expected_file_is_downloaded_and_only_once(mirror, output, run):
    for _ in range(2):
        assert "downloaded and verified" in run(0, mirror.url + "/right")
    assert output.read_bytes() == CONTENT
    assert output.stat().st_mode & 0o777 == 0o644
    assert [*output.parent.iterdir()] == [output]
    assert mirror.requests.qsize() == 1


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
def test_a_failed_download_is_one_line_and_leaves_nothing(mirror, output, run, monkeypatch, url, message):
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.2)
    line = run(1, url.replace("MIRROR", mirror.url))
    assert re.search(message, line)
    assert "use a mirror with --url" in line
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
        mirror.requests.get(timeout=60)
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
