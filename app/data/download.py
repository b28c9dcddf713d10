"""Download the real hotel reviews of ChnSentiCorp and verify their SHA-256.

    python -m app.data.download                                  # where training looks for them first
    python -m app.data.download --url https://MIRROR/file.csv    # the same file from another server
    python -m app.data.download --output FOLDER/file.csv

The file is part of the public repository SophonPlus/ChineseNlpCorpus. It receives its name only after its SHA-256 has
been verified, so a partial or different file never has this name. Exit statuses: 0 the file is there, 1 the download
failed, 2 invalid command line, 130 interrupted (Ctrl-C, SIGTERM or SIGHUP).
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import os
import signal
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from ..common.errors import OneLineError, UserError, escape_control_characters, escape_unencodable_output
from ..common.files import staging_folder
from ..common.interrupts import as_interrupt
from ..common.paths import DOWNLOADED_CSV, PACKAGE
from ..common.progress import hides_progress

URL = (
    "https://raw.githubusercontent.com/SophonPlus/ChineseNlpCorpus/master/"
    "datasets/ChnSentiCorp_htl_all/ChnSentiCorp_htl_all.csv"
)
SHA256 = "1d414b9c65caf3a836abdb4efded621968502ad3338e1a9d885ae131c86083f0"
MAX_BYTES = 2_904_858  # the size of the file with this SHA-256
TIMEOUT_SECONDS = 30.0  # for the connection and for each read
CHUNK_BYTES = 1 << 16


class DownloadError(OneLineError):
    """The download failed through no mistake of the user."""


def download(url: str = URL, output: Path = DOWNLOADED_CSV) -> bool:
    """Download a file and verify its SHA-256.

    torch.hub.download_url_to_file is not used because it has neither a size limit nor a timeout.

    Args:
        url: An http, https or file URL.
        output: Where to put the file. At most `MAX_BYTES` are ever written, to a staging folder next to it, which is
            removed after any error. The next call removes what a killed process left.

    Returns:
        False if the file was already there.

    Raises:
        UserError: The URL or the output cannot be used.
        DownloadError: The download failed, or the content is not the expected one.
    """
    _check_url(url)
    if _is_present(output):
        return False
    digest = hashlib.sha256()
    try:
        with staging_folder(output) as staging:
            with (staging / output.name).open("wb") as file:
                for chunk in _fetch(url):
                    file.write(chunk)
                    digest.update(chunk)
                if digest.hexdigest() != SHA256:
                    raise DownloadError(
                        f"{url}: wrong SHA-256: expected {SHA256}, got {digest.hexdigest()}; try a mirror with --url"
                    )
                file.flush()
                os.fsync(file.fileno())
            os.replace(staging / output.name, output)
    except OSError as error:
        raise DownloadError(f"{output}: cannot be written: {error.strerror or error}") from error
    return True


def create_folder_of_downloads() -> None:
    """Create the default folder.

    Raises:
        UserError: It cannot be created.
    """
    try:
        DOWNLOADED_CSV.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{DOWNLOADED_CSV.parent}: cannot be created: {error.strerror}; choose --output") from error


def _check_url(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        is_usable = bool({"http": parts.hostname, "https": parts.hostname, "file": parts.path}.get(parts.scheme))
        _ = parts.port  # raises ValueError if it is not a valid port
    except ValueError:
        is_usable = False
    if not is_usable or not url.isascii() or not url.isprintable() or " " in url:
        raise UserError(f"--url {url!r}: must be a valid http://, https:// or file:/// URL, percent-encoded if needed")


def _is_present(output: Path) -> bool:
    """Tell whether the output is already the expected file.

    Raises:
        UserError: Its folder does not exist or is not writable, or it is a different file.
    """
    try:
        if not output.parent.is_dir():
            raise UserError(f"--output {output}: the folder {output.parent} does not exist; create it first")
        if not output.exists():
            if not os.access(output.parent, os.W_OK):
                raise UserError(f"--output {output}: the folder {output.parent} is not writable")
            return False
        with output.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"--output {output}: cannot be used: {error.strerror}") from error
    if found != SHA256:
        raise UserError(
            f"--output {output}: is a different file (SHA-256 {found}, expected {SHA256}); "
            "move it away or choose another --output"
        )
    return True


def _fetch(url: str) -> Iterator[bytes]:
    """Yield the content behind a URL in chunks, with a progress bar if standard error is a terminal.

    Raises:
        DownloadError: The server cannot be reached or reports an error, or the content is too long or incomplete.
    """
    request = urllib.request.Request(url, headers={"User-Agent": "samebits"})
    # It is complete before the request, because a signal in its constructor would print a traceback.
    progress = tqdm(unit="B", unit_scale=True, desc=DOWNLOADED_CSV.name, disable=hides_progress())
    try:
        with progress, urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            length = response.headers.get("Content-Length", "")
            total = int(length[:18]) if length.isdecimal() else None  # int() rejects thousands of digits
            if total is not None and total > MAX_BYTES:
                raise _too_long(url)
            progress.total = total
            received = 0
            while chunk := response.read(CHUNK_BYTES):
                received += len(chunk)
                if received > MAX_BYTES:
                    raise _too_long(url)
                progress.update(len(chunk))
                yield chunk
            if total is not None and received != total:  # read(n) reports a lost connection as the end of the content
                raise DownloadError(f"{url}: the connection ended after {received:,} of {total:,} bytes; try again")
    except urllib.error.HTTPError as error:
        error.close()
        raise DownloadError(f"{url}: HTTP status {error.code} ({error.reason}); try a mirror with --url") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise DownloadError(f"{url}: {reason}; try again, or use a mirror with --url") from error


def _too_long(url: str) -> DownloadError:
    return DownloadError(
        f"{url}: is a different file, longer than the {MAX_BYTES:,} bytes expected; try a mirror with --url"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PACKAGE}.data.download",
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--url", default=URL, help="URL of the file (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=DOWNLOADED_CSV, help="path of the downloaded file (default: %(default)s)"
    )
    try:
        arguments, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from error
    if unknown:
        raise UserError(f"unknown argument {unknown[0]!r}; the flags are --url, --output and --help")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    escape_unencodable_output()
    try:
        arguments = _parse(argv)
        with as_interrupt(signal.SIGTERM, signal.SIGHUP):
            if arguments.output == DOWNLOADED_CSV:  # in the user's cache, unless this is a clone
                create_folder_of_downloads()
            is_new = download(arguments.url, arguments.output)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except DownloadError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    result = "downloaded and verified" if is_new else "already downloaded and verified"
    print(f"{escape_control_characters(str(arguments.output))}: {result}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
