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
from app.common.interrupts import as_interrupt
from app.common.paths import DOWNLOADED_CSV
from app.data import download
from app.data.csv_table import read_reviews

CONTENT = ("label,review\n" + "1,很好，还会再来\n0,太吵了\n" * 10_000).encode()


class Mirror(BaseHTTPRequestHandler):
    """Serves /right, /wrong, /truncated, /unannounced (no Content-Length), /hangs and /endless; otherwise 404."""

    def do_GET(self):
        self.server.requests.append(self.path)
        body = {"/wrong": CONTENT[:-1], "/truncated": CONTENT[:-5000]}.get(self.path, CONTENT)
        if self.path not in ("/right", "/wrong", "/truncated", "/unannounced", "/hangs", "/endless"):
            self.send_error(404)
            return
        self.send_response(200)
        if self.path == "/endless":
            self.send_header("Content-Length", "9" * 5000)
        elif self.path != "/unannounced":
            self.send_header("Content-Length", str(len(CONTENT) if self.path != "/wrong" else len(body)))
        self.end_headers()
        if self.path == "/hangs":
            self.wfile.write(body[:1000])
            self.server.requested.set()
            self.server.released.wait(30)
        else:
            self.wfile.write(body)

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
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "reviews.csv"


def error_of(capsys, status, *arguments) -> str:
    """Return the only line on standard error of a command that exits with this status."""
    assert download.main([str(argument) for argument in arguments]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    return printed.err


@pytest.mark.parametrize("page", ["/right", "/unannounced"])
def test_the_expected_file_is_downloaded(mirror, output, capsys, page):
    assert download.main(["--url", mirror.url + page, "--output", str(output)]) == 0
    assert output.read_bytes() == CONTENT
    assert list(output.parent.iterdir()) == [output]
    assert f"{output}: downloaded and verified" in capsys.readouterr().out
    assert len(read_reviews(output)) == 20_000


def test_the_file_has_the_permissions_of_any_new_file(mirror, output):
    (output.parent / "other").touch()
    assert download.download(mirror.url + "/right", output) is True
    assert output.stat().st_mode == (output.parent / "other").stat().st_mode


def test_an_existing_file_is_not_downloaded_again(mirror, output, capsys):
    output.write_bytes(CONTENT)
    assert download.main(["--url", mirror.url + "/right", "--output", str(output)]) == 0
    assert "already downloaded" in capsys.readouterr().out
    assert mirror.requests == []


def test_a_file_url_is_copied(output, tmp_path):
    (tmp_path / "copy.csv").write_bytes(CONTENT)
    assert download.main(["--url", (tmp_path / "copy.csv").as_uri(), "--output", str(output)]) == 0
    assert output.read_bytes() == CONTENT


def test_wrong_content_is_rejected_with_both_hashes_and_a_remedy(mirror, output, capsys):
    line = error_of(capsys, 1, "--url", mirror.url + "/wrong", "--output", output)
    assert f"expected {download.SHA256}, got {hashlib.sha256(CONTENT[:-1]).hexdigest()}" in line
    assert "--url" in line
    assert list(output.parent.iterdir()) == []


def test_a_truncated_response_is_rejected(mirror, output, capsys):
    line = error_of(capsys, 1, "--url", mirror.url + "/truncated", "--output", output)
    assert f"ended after {len(CONTENT) - 5000:,} of {len(CONTENT):,} bytes" in line
    assert list(output.parent.iterdir()) == []


def test_a_stalled_response_times_out(mirror, output, capsys, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.2)
    assert "timed out" in error_of(capsys, 1, "--url", mirror.url + "/hangs", "--output", output)
    assert list(output.parent.iterdir()) == []


def test_an_http_error_is_reported(mirror, output, capsys):
    line = error_of(capsys, 1, "--url", mirror.url + "/none", "--output", output)
    assert "HTTP status 404" in line
    assert "--url" in line
    assert list(output.parent.iterdir()) == []


def test_a_refused_connection_is_reported(output, capsys):
    with socket.socket() as unused:
        unused.bind(
            ("127.0.0.1", 0)
        )  # bound but not listening: connections are refused, and no other process gets the port
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/right"
        assert "refused" in error_of(capsys, 1, "--url", url, "--output", output)
    assert list(output.parent.iterdir()) == []


def test_a_file_url_without_a_file_is_reported(output, tmp_path, capsys):
    assert "none.csv" in error_of(capsys, 1, "--url", (tmp_path / "none.csv").as_uri(), "--output", output)


def test_ctrl_c_leaves_no_file(mirror, output, capsys, monkeypatch):
    written = []

    def interrupted(url):
        yield CONTENT[:1000]
        written.extend(output.parent.rglob(output.name))
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "_fetch", interrupted)
    assert "interrupted" in error_of(capsys, 130, "--url", mirror.url + "/right", "--output", output)
    assert len(written) == 1
    assert written != [output]
    assert list(output.parent.iterdir()) == []


def test_a_full_disk_is_reported(mirror, output, capsys, monkeypatch):
    def no_space(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    line = error_of(capsys, 1, "--url", mirror.url + "/right", "--output", output)
    assert "No space left on device" in line
    assert str(output) in line
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize(
    "url", ["ftp://host/f", "file.csv", "", "http://", "http://[::1", "http://h:x/", "http://h/a b", "https://h/好"]
)
def test_an_unusable_url_is_rejected(output, capsys, url):
    assert f"--url {url!r}" in error_of(capsys, 2, "--url", url, "--output", output)
    assert list(output.parent.iterdir()) == []


def test_a_different_file_is_not_overwritten(mirror, output, capsys):
    output.write_text("mine")
    assert "is a different file" in error_of(capsys, 2, "--url", mirror.url + "/right", "--output", output)
    assert output.read_text() == "mine"
    assert mirror.requests == []


def test_an_output_that_is_a_folder_or_in_a_missing_folder_is_rejected(mirror, output, capsys):
    assert "directory" in error_of(capsys, 2, "--url", mirror.url + "/right", "--output", output.parent)
    missing = output.parent / "none" / "reviews.csv"
    assert "does not exist" in error_of(capsys, 2, "--url", mirror.url + "/right", "--output", missing)
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--ulr", "x"], ["file.csv"], ["--url"]])
def test_an_invalid_command_line_is_one_line(capsys, arguments):
    error_of(capsys, 2, *arguments)


def test_an_output_folder_that_is_not_writable_is_rejected(mirror, mount, output, capsys):
    target = mount("ro") / "reviews.csv"
    assert "is not writable" in error_of(capsys, 2, "--url", mirror.url + "/right", "--output", target)
    assert mirror.requests == []


@pytest.mark.parametrize("page", ["/right", "/unannounced"])
def test_a_longer_file_is_rejected_before_it_fills_the_disk(mirror, output, capsys, monkeypatch, page):
    monkeypatch.setattr(download, "MAX_BYTES", len(CONTENT) - 1)
    written = []
    write = download.hashlib.sha256

    class Counted:
        def __init__(self):
            self.digest = write()

        def update(self, chunk):
            written.append(len(chunk))
            self.digest.update(chunk)

    monkeypatch.setattr(download.hashlib, "sha256", Counted)
    line = error_of(capsys, 1, "--url", mirror.url + page, "--output", output)
    assert f"longer than the {len(CONTENT) - 1:,} bytes expected" in line
    assert sum(written) < len(CONTENT)
    assert list(output.parent.iterdir()) == []


def test_the_size_limit_is_the_size_of_the_real_file(real_csv):
    assert real_csv.stat().st_size == download.MAX_BYTES
    assert hashlib.sha256(real_csv.read_bytes()).hexdigest() == download.SHA256


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_a_download_leaves_no_file(mirror, output, number):
    command = [sys.executable, "-m", "app.data.download", "--url", mirror.url + "/hangs", "--output", str(output)]
    with subprocess.Popen(command, cwd=PROJECT, stderr=subprocess.PIPE, text=True) as process:
        assert mirror.requested.wait(30)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "interrupted; nothing was written\n"
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


def test_a_content_length_of_thousands_of_digits_is_reported(mirror, output, capsys):
    line = error_of(capsys, 1, "--url", mirror.url + "/endless", "--output", output)
    assert "longer than" in line
