"""Downloading the real CSV, from servers that misbehave in various ways."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers.jobs import PROJECT, unavailable

from app.common.files import staging_folder
from app.common.paths import DOWNLOADED_CSV
from app.common.terminal import as_interrupt
from app.data import download
from app.program import run_program

CONTENT = ("label,review\n" + "1,很好，还会再来\n0,太吵了\n" * 10_000).encode()


class Mirror(BaseHTTPRequestHandler):
    """Serves /right, /second-time, /wrong, /truncated and /hangs; otherwise 404."""

    def do_GET(self):
        self.server.requests.append(self.path)
        if self.path not in ("/right", "/second-time", "/wrong", "/truncated", "/hangs"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        if self.path == "/hangs":
            self.wfile.write(CONTENT[:1000])
            self.server.requested.set()
            self.server.released.wait(30)
        elif self.path == "/truncated" or (self.path == "/second-time" and len(self.server.requests) == 1):
            self.wfile.write(CONTENT[:-5000])
        else:
            self.wfile.write(CONTENT if self.path != "/wrong" else CONTENT[::-1])

    def log_message(self, *_):
        pass


@pytest.fixture
def mirror(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        server.requests, server.released, server.requested = [], threading.Event(), threading.Event()
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def output(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between two attempts
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "reviews.csv"


@pytest.fixture
def run(monkeypatch, capsys):
    """Call `run(status, *arguments)`: it returns what the program prints, which is one line."""

    def run(status, *arguments):
        monkeypatch.setattr(sys, "argv", ["download", *map(str, arguments)])
        assert run_program(download.main) == status
        printed = capsys.readouterr()
        lines = (printed.err if status else printed.out).splitlines()
        assert len(lines) == 1
        assert (printed.out if status else printed.err) == ""
        return lines[0]

    return run


@pytest.mark.parametrize(("page", "requests"), [("/right", 1), ("/second-time", 2)])
def test_the_expected_file_is_downloaded_and_only_once(mirror, output, run, page, requests):
    assert "downloaded and verified" in run(0, "--url", mirror.url + page, "--output", output)
    assert output.read_bytes() == CONTENT
    (output.parent / "other").touch()
    assert output.stat().st_mode == (output.parent / "other").stat().st_mode
    assert sorted(path.name for path in output.parent.iterdir()) == ["other", output.name]
    assert "already downloaded" in run(0, "--url", mirror.url + page, "--output", output)
    assert mirror.requests == [page] * requests


def test_a_file_url_is_copied(output, tmp_path, run):
    (tmp_path / "copy.csv").write_bytes(CONTENT)
    run(0, "--url", (tmp_path / "copy.csv").as_uri(), "--output", output)
    assert output.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("/wrong", f"does not match the known hash: expected {hashlib.sha256(CONTENT).hexdigest()}"),
        ("/truncated", "try again, or use a mirror with --url"),
        ("/hangs", "timed out"),
        ("/none", "404"),
    ],
)
def test_a_failed_download_is_one_line_and_leaves_nothing(mirror, output, run, monkeypatch, page, message):
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.2)
    assert message in run(1, "--url", mirror.url + page, "--output", output)
    assert list(output.parent.iterdir()) == []


def test_a_rejected_connection_is_one_line(output, run, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # not listening: no connection, and no other process gets the port
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/right"
        assert "refused" in run(1, "--url", url, "--output", output)
    assert list(output.parent.iterdir()) == []


def test_a_file_url_without_a_file_is_one_line(output, tmp_path, run):
    assert "none.csv: No such file" in run(1, "--url", (tmp_path / "none.csv").as_uri(), "--output", output)


def test_a_full_disk_is_one_line(mirror, output, run, monkeypatch):
    def no_space(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    line = run(2, "--url", mirror.url + "/right", "--output", output)
    assert f"{output}: cannot be used: No space left on device" in line
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize("url", ["ftp://host/f", "file.csv", "", "http://", "http://[::1", "http://h:x/"])
def test_an_unusable_url_is_one_line(output, run, url):
    assert "--url " in run(2, "--url", url, "--output", output)
    assert list(output.parent.iterdir()) == []


def test_an_unusable_output_is_one_line(mirror, output, mount, run):
    flags = ["--url", mirror.url + "/right", "--output"]
    output.write_text("mine")
    assert "is a different file" in run(2, *flags, output)
    assert output.read_text() == "mine"
    assert "directory" in run(2, *flags, output.parent)
    assert "No such file or directory" in run(2, *flags, output.parent / "none" / "reviews.csv")
    assert "Read-only" in run(2, *flags, mount("ro") / "reviews.csv")
    assert mirror.requests == []


@pytest.mark.parametrize("arguments", [["--ulr", "x"], ["file.csv"], ["--url"]])
def test_an_invalid_command_line_is_one_line(run, arguments):
    run(2, *arguments)


def test_the_hash_is_that_of_the_real_file(real_csv):
    assert hashlib.sha256(real_csv.read_bytes()).hexdigest() == download.SHA256


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_a_download_leaves_no_file(mirror, output, number):
    command = [sys.executable, "-m", "app.data.download", "--url", mirror.url + "/hangs", "--output", str(output)]
    with subprocess.Popen(command, cwd=PROJECT, stderr=subprocess.PIPE, text=True) as process:
        assert mirror.requested.wait(60)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert len(errors.splitlines()) == 1
    assert errors.startswith("interrupted")
    assert list(output.parent.iterdir()) == []


def test_an_ignored_hangup_stays_ignored(mirror, output):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with as_interrupt(signal.SIGHUP):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_git_ignores_the_download_and_its_staging_folder(tmp_path):
    with staging_folder(tmp_path / DOWNLOADED_CSV.name) as staging:
        temporary = [DOWNLOADED_CSV.with_name(path.name) for path in staging.parent.iterdir()]
    names = [DOWNLOADED_CSV, *temporary]
    ignored = subprocess.run(["git", "check-ignore", *names], cwd=PROJECT, capture_output=True, text=True, check=False)
    if "not a git repository" in ignored.stderr:
        unavailable("a copy without its repository")
    assert ignored.stdout.splitlines() == list(map(str, names))
