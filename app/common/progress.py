"""Whether progress bars are shown."""

from __future__ import annotations

import sys


def hides_progress(disable_tqdm: bool = False, is_main_process: bool = True) -> bool:
    """Return tqdm's `disable`: only one rank shows a bar, on a terminal. In a file, each update would be a line."""
    return disable_tqdm or not is_main_process or not sys.stderr.isatty()
