"""Whether progress bars are shown."""

from __future__ import annotations

import sys


def hides_progress(disable_tqdm: bool = False, is_main_process: bool = True) -> bool:
    """Return whether a progress bar is hidden, as tqdm's `disable`.

    A bar is shown by one rank only, on a terminal: in a file, each of its updates would be a line.

    Args:
        disable_tqdm: `--disable_tqdm`.
        is_main_process: whether this is rank 0, or a program without ranks.
    """
    return disable_tqdm or not is_main_process or not sys.stderr.isatty()
