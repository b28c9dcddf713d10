"""Download the real hotel reviews of ChnSentiCorp and verify their SHA-256.

    python -m app.data.download                                  # where training looks for them first
    python -m app.data.download --url https://MIRROR/file.csv    # the same file from another server
    python -m app.data.download --output FOLDER/file.csv

The file is part of the public repository SophonPlus/ChineseNlpCorpus. It receives its name only after its SHA-256 has
been verified, so a partial or different file never has this name. Exit statuses: 0 the file is there, 1 the download
failed, 2 invalid command line, 130 interrupted (Ctrl-C, SIGTERM or SIGHUP).
"""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pooch
import requests

from ..cli import OneLineParser
from ..common.errors import RunError, UserError, escape_control_characters, shorten
from ..common.files import commit, staging_folder
from ..common.paths import DOWNLOADED_CSV
from ..common.terminal import hides_progress
from ..program import run_program

URL = (
    "https://raw.githubusercontent.com/SophonPlus/ChineseNlpCorpus/master/"
    "datasets/ChnSentiCorp_htl_all/ChnSentiCorp_htl_all.csv"
)
SHA256 = "1d414b9c65caf3a836abdb4efded621968502ad3338e1a9d885ae131c86083f0"
TIMEOUT_SECONDS = 30.0  # for the connection and for each read
RETRIES = 2


def download(url: str, output: Path) -> bool:
    """Download the file and verify its SHA-256. Return False if it was already there.

    Raises:
        UserError: the URL or the output cannot be used.
        RunError: the download failed, or the content is not the expected one.
    """
    try:
        if output.exists():
            if pooch.file_hash(str(output)) != SHA256:
                raise UserError(f"--output {output}: is a different file; move it away or choose another --output")
            return False
        if output == DOWNLOADED_CSV:  # in the user's cache, unless this is a clone
            output.parent.mkdir(parents=True, exist_ok=True)
        with staging_folder(output) as staging:
            content = fetch(url, staging / "download").read_bytes()
            (staging / output.name).write_bytes(content)  # the file of pooch is readable by its owner only
            commit(staging / output.name, output)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be used: {error.strerror or error}") from error
    return True


def fetch(url: str, folder: Path) -> Path:
    """Download the file into a folder, with retries and a progress bar, and return its verified path."""
    try:
        requests.Request("GET", url).prepare()  # so that an unusable URL is not tried several times
    except ValueError as problem:
        raise UserError(f"--url {url}: {problem}") from problem
    scheme, name = urlsplit(url).scheme, DOWNLOADED_CSV.name
    if scheme not in ("http", "https", "file"):
        raise UserError(f"--url {url!r}: must be an http://, https:// or file:/// URL")
    files = pooch.create(folder, "", registry={name: SHA256}, urls={name: url}, retry_if_failed=RETRIES)
    pooch.get_logger().setLevel(logging.ERROR)
    get = pooch.HTTPDownloader(progressbar=not hides_progress(), timeout=TIMEOUT_SECONDS)
    try:
        return Path(files.fetch(name, downloader=copy_local_file if scheme == "file" else get))
    except (requests.RequestException, ValueError) as problem:  # pooch raises ValueError for a wrong hash
        raise RunError(f"{url}: {shorten(problem, 300)}; try again, or use a mirror with --url") from problem


def copy_local_file(url: str, output: str, _: object) -> None:
    """Download a file:/// URL, which pooch has no downloader for."""
    try:
        shutil.copyfile(url2pathname(urlsplit(url).path), output)
    except OSError as problem:
        raise RunError(f"{url}: {problem.strerror}") from problem


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--url", default=URL, help="URL of the file")
    parser.add_argument("--output", type=Path, default=DOWNLOADED_CSV, help="path of the downloaded file")
    arguments = parser.parse_args()
    is_new = download(arguments.url, arguments.output)
    result = "downloaded and verified" if is_new else "already downloaded and verified"
    print(f"{escape_control_characters(str(arguments.output))}: {result}")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
