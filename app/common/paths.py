"""The location and the name of this package."""

from __future__ import annotations

import os
import re
from pathlib import Path

PACKAGE = __name__.partition(".")[0]  # samebits if it is installed, app in a clone: the prefix of `python -m` commands
_FOLDER = Path(__file__).resolve().parents[1]
# The folder of a git clone or of an unpacked archive; None for a wheel, in which the package's folder is `samebits`.
CLONE = _FOLDER.parent if _FOLDER.name == "app" else None
SAMPLE_CSV = _FOLDER / "data" / "sample_reviews.csv"
TEMPLATES = _FOLDER / "templates"


def _downloads() -> Path:
    """Return the folder of downloads: the clone's data/ if it exists, otherwise one in the user's cache."""
    if CLONE is not None and (CLONE / "data").is_dir():
        return CLONE / "data"
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache")) / "samebits"


DOWNLOADED_CSV = _downloads() / "ChnSentiCorp_htl_all.csv"


def with_package_name(text: str) -> str:
    """Return a text in which commands such as `python -m app.compare` name the package as it is called here."""
    return re.sub(r"(?<!\w)app\.(?=[a-z])", f"{PACKAGE}.", text)
