"""Fetch the real hotel reviews of ChnSentiCorp, once, and know that they are the right ones.

    python -m app.data.download                                  # into data/, where the training looks first
    python -m app.data.download --url https://MIRROR/file.csv    # the same file from elsewhere
    python -m app.data.download --output FOLDER/file.csv

The file is the one in the public repository SophonPlus/ChineseNlpCorpus; its SHA-256 is checked before it takes its
name, so under that name there is never a partial file or another one. Exit status: 0 it is there, 1 the download
failed, 2 the command line is wrong, 130 interrupted (Ctrl-C, SIGTERM or SIGHUP).
"""

import argparse
import fcntl
import glob
import hashlib
import http.client
import os
import signal
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from app.errors import OneLineError, UserError, escape_control_characters, escape_unencodable_output
from app.interrupts import as_interrupt

URL = (
    "https://raw.githubusercontent.com/SophonPlus/ChineseNlpCorpus/master/"
    "datasets/ChnSentiCorp_htl_all/ChnSentiCorp_htl_all.csv"
)
SHA256 = "1d414b9c65caf3a836abdb4efded621968502ad3338e1a9d885ae131c86083f0"
MAX_BYTES = 2_904_858  # the size of the file with this SHA-256: anything longer is another file
OUTPUT = Path(__file__).parents[2] / "data" / "ChnSentiCorp_htl_all.csv"

TIMEOUT_SECONDS = 30.0
"""without an answer, or without another byte"""
_CHUNK_BYTES = 1 << 16


class DownloadError(OneLineError):
    """The download failed, by no mistake of the user's; one line."""


def download(url: str = URL, output: Path = OUTPUT) -> bool:
    """Fetch `url` (http, https or file) into `output`; False where the right file was there already.

    The bytes go to a temporary file in the same folder, which takes the name `output` only once it is complete, has the
    right SHA-256 and is on disk. Every exception removes it; what a SIGKILL or a power cut leaves is removed by the
    next call. No more than `MAX_BYTES` are ever written.

    Raises `UserError` for a URL or an output that can't be used and `DownloadError` for what failed on the way.
    """
    _check_url(url)
    if _is_there(output):
        return False
    _remove_stale(output)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        file = temporary.open("wb")
        _try_lock(file.fileno())
    except OSError as error:
        raise UserError(f"--output {output}: can't be written: {error.strerror}") from error
    try:
        digest = hashlib.sha256()
        with file:
            for chunk in _fetched(url):
                file.write(chunk)
                digest.update(chunk)
            if digest.hexdigest() != SHA256:
                raise DownloadError(
                    f"{url}: wrong SHA-256: expected {SHA256}, got {digest.hexdigest()}; try a mirror with --url"
                )
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, output)
    except OSError as error:
        raise DownloadError(f"{output}: writing failed: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _check_url(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        usable = {"http": parts.hostname, "https": parts.hostname, "file": parts.path}.get(parts.scheme)
        _ = parts.port  # raises ValueError where it is no port
    except ValueError:
        usable = None
    if not usable or not url.isascii() or not url.isprintable() or " " in url:
        raise UserError(f"--url {url!r}: not a URL that can be fetched: http://…, https://… or file:///…, %-encoded")


def _is_there(output: Path) -> bool:
    """Whether the right file is there; a `UserError` where something else is, or the folder isn't."""
    try:
        if not output.parent.is_dir():
            raise UserError(f"--output {output}: there is no folder {output.parent}; make it first")
        if not output.exists():
            return False
        with output.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"--output {output}: can't be used: {error.strerror}") from error
    if found != SHA256:
        raise UserError(
            f"--output {output}: another file is there (SHA-256 {found}, expected {SHA256}); "
            "move it away, or choose another --output"
        )
    return True


def _remove_stale(output: Path) -> None:
    """Remove the temporary files of downloads that were killed.

    A running download holds a lock on its file, so it is never mistaken for a killed one.
    """
    for name in glob.glob(f".{glob.escape(output.name)}.*.part", root_dir=output.parent):
        path = output.with_name(name)
        with suppress(OSError), path.open("rb") as file:
            if _try_lock(file.fileno()):
                path.unlink()


def _try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed; False where another process has it or the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _fetched(url: str) -> Iterator[bytes]:
    """The bytes behind the URL, chunk by chunk, with a progress bar on a terminal; `DownloadError` where they end."""
    request = urllib.request.Request(url, headers={"User-Agent": "app.data.download"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            length = response.headers.get("Content-Length", "")
            total = int(length[:18]) if length.isdecimal() else None  # int() refuses a number of thousands of digits
            if total is not None and total > MAX_BYTES:
                raise _too_long(url)
            # disable=None: no bar where standard error is no terminal
            with tqdm(total=total, unit="B", unit_scale=True, desc=OUTPUT.name, disable=None) as progress:
                received = 0
                while chunk := response.read(_CHUNK_BYTES):
                    received += len(chunk)
                    if received > MAX_BYTES:
                        raise _too_long(url)
                    progress.update(len(chunk))
                    yield chunk
            if total is not None and received != total:  # a read of n bytes takes the end of a connection for the end
                raise DownloadError(f"{url}: the connection ended after {received:,} of {total:,} bytes; try again")
    except urllib.error.HTTPError as error:
        error.close()
        raise DownloadError(f"{url}: HTTP status {error.code} ({error.reason}); try a mirror with --url") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise DownloadError(f"{url}: {reason}; try again, or a mirror with --url") from error


def _too_long(url: str) -> DownloadError:
    return DownloadError(f"{url}: another file: longer than the {MAX_BYTES:,} bytes expected; try a mirror with --url")


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m app.data.download",
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--url", default=URL, help="where to fetch it from (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where to put it (default: %(default)s)")
    try:
        arguments, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from error
    if unknown:
        raise UserError(f"unknown argument {unknown[0]!r}; there are --url, --output and --help")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    escape_unencodable_output()
    try:
        arguments = _parsed(argv)
        with as_interrupt(signal.SIGTERM, signal.SIGHUP):
            fetched = download(arguments.url, arguments.output)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except DownloadError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    what = "downloaded, SHA-256 as expected" if fetched else "already there and right"
    print(f"{escape_control_characters(str(arguments.output))}: {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
