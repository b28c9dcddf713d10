"""What programs say about docs/, and the links of all pages, lead to a file and to a section that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def check(folder: Path, links: list[str], page: Path | None = None) -> None:
    for link in links:
        name, _, anchor = link.partition("#")
        target = folder / name if name or page is None else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_programs_refer_to_sections():
    programs = "\n".join(module.read_text("utf-8") for module in (REPOSITORY / "app").rglob("*.py"))
    links = re.findall(r"docs/\w+\.md(?:#[\w-]+)?", programs)
    assert any("#" in link for link in links)
    check(REPOSITORY, links)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_to_a_section(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    check(page.parent, [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link], page)
