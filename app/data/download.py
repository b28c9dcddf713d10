"""Download the real hotel reviews of ChnSentiCorp and verify their SHA-256.

    python -m app.data.download                                  # where training looks for them first
    python -m app.data.download --url https://MIRROR/file.csv    # the same file from another server

The file is part of the public repository SophonPlus/ChineseNlpCorpus. It receives its name only after its SHA-256 has
been verified. Exit statuses: 0 the file is there, 1 the download failed, 2 invalid command line, 130 interrupted.
"""

from __future__ import annotations

import logging
import sys

import pooch
import requests

from ..cli import OneLineParser
from ..common.errors import RunError, escape_control_characters, shorten
from ..common.paths import DOWNLOADED_CSV
from ..common.terminal import hides_progress
from ..program import run_program

URL = (
    "https://raw.githubusercontent.com/SophonPlus/ChineseNlpCorpus/master/"
    "datasets/ChnSentiCorp_htl_all/ChnSentiCorp_htl_all.csv"
)
SHA256 = "1d414b9c65caf3a836abdb4efded621968502ad3338e1a9d885ae131c86083f0"
TIMEOUT_SECONDS = 30.0  # for the connection and for each read


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--url", default=URL, help="URL of the file")
    url = parser.parse_args().url
    pooch.get_logger().setLevel(logging.ERROR)
    get = pooch.HTTPDownloader(progressbar=not hides_progress(), timeout=TIMEOUT_SECONDS)
    try:
        pooch.retrieve(url, SHA256, DOWNLOADED_CSV.name, DOWNLOADED_CSV.parent, downloader=get)
        DOWNLOADED_CSV.chmod(0o644)  # pooch's file is readable by its owner only
    except (requests.RequestException, OSError, ValueError) as problem:  # ValueError: a wrong hash
        raise RunError(f"{url}: {shorten(problem, 300)}; try again, or use a mirror with --url") from problem
    print(f"{escape_control_characters(str(DOWNLOADED_CSV))}: downloaded and verified")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
