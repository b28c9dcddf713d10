"""Pages in Chinese are held in step with the English ones: the same structure, commands, flags and numbers."""

from __future__ import annotations

import re
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
TRANSLATIONS = {
    page.relative_to(REPOSITORY).as_posix(): page.relative_to(REPOSITORY).as_posix().replace(".zh-CN", "")
    for page in (*REPOSITORY.glob("*.zh-CN.md"), *REPOSITORY.glob("docs/*.zh-CN.md"))
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.#/-])\d+(?:,\d{3})*(?:\.\d+)*%?(?![\w-])")


def sections(page: str) -> list[tuple[int, str]]:
    """The level of each heading, and the text of its section; the text before the first one has level 0."""
    text = (REPOSITORY / page).read_text("utf-8")
    masked = BLOCK.sub(lambda block: re.sub(r"^#", " ", block.group(), flags=re.MULTILINE), text)
    starts = [(0, 0), *((heading.start(), len(heading[1])) for heading in re.finditer(r"^(#+) ", masked, re.MULTILINE))]
    ends = [start for start, _ in starts[1:]] + [len(text)]
    return [(level, text[start:end]) for (start, level), end in zip(starts, ends, strict=True)]


def commands(section: str) -> list[str]:
    """The blocks of code, without comments, which are translated."""
    return [re.sub(r" +#.*", "", body) for language, body in BLOCK.findall(section) if language]


def without_blocks(section: str) -> str:
    return BLOCK.sub("", section)


def flags(section: str) -> Counter[str]:
    return Counter(re.findall(r"--\w+", without_blocks(section)))


def numbers(section: str) -> Counter[str]:
    return Counter(NUMBER.findall(without_blocks(section)))


def links(section: str) -> Counter[str]:
    """The links, apart from those between the two languages."""
    found = re.findall(r"\]\(([^)\s]+)", section)
    names = {Path(page).name for pair in TRANSLATIONS.items() for page in pair}
    return Counter(
        link for link in found if Path(link.partition("#")[0]).name not in names and not link.startswith("#")
    )


def test_there_are_translations():
    assert "README.zh-CN.md" in TRANSLATIONS


@pytest.mark.parametrize("page", TRANSLATIONS)
def test_a_translation_is_in_step(page):
    own, english = sections(page), sections(TRANSLATIONS[page])
    assert [level for level, _ in own] == [level for level, _ in english]
    for (_, a), (_, b) in zip_longest(own, english):
        title = b.partition("\n")[0]
        for extract in (commands, flags, numbers, links):
            assert extract(a) == extract(b), f"{title}: {extract.__name__}"
