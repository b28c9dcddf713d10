"""What the programs say about docs/ leads to a page and to a section that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

REFERENCES = sorted(
    {
        reference
        for module in (REPOSITORY / "app").rglob("*.py")
        for reference in re.findall(r"docs/(\w+\.md(?:#[\w-]+)?)", module.read_text("utf-8"))
    }
)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_programs_refer_to_sections():
    assert any("#" in reference for reference in REFERENCES)


@pytest.mark.parametrize("reference", REFERENCES)
def test_a_reference_leads_to_a_section(reference):
    name, _, anchor = reference.partition("#")
    page = REPOSITORY / "docs" / name
    assert page.is_file()
    assert not anchor or anchor in anchors(page)
