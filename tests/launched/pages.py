"""The commands of the pages for readers."""

from __future__ import annotations

import re

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:python -m app\.|torchrun |samebits |bash run_scripts/)[^`]+)`")


def commands_in_blocks(text: str) -> list[str]:
    """The commands of a page's blocks of shell code, in order."""
    blocks = [re.sub(r" *\\\n *", " ", block) for kind, block in BLOCK.findall(text) if kind == "bash"]
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


def commands_of(text: str) -> list[str]:
    """The commands of a page, also those in sentences."""
    return [*commands_in_blocks(text), *(" ".join(found.split()) for found in INLINE.findall(BLOCK.sub("", text)))]
