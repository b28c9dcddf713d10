"""What programs say about docs/, and the links of all pages, lead to a file and to a section that exist."""

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


PAGES = [page.relative_to(REPOSITORY).as_posix() for page in (*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_to_a_section(page):
    file = REPOSITORY / page
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", file.read_text("utf-8"), flags=re.DOTALL))
    for link in links:
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = file.parent / name if name else file
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
