"""The docs hang together: links lead somewhere, lines fit a screen, every page is in the index."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
WIDTH = 120


def prose(page):
    """Without blocks of code, in which nothing is a heading or a link."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page):
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in links(page):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        to = (page.parent / name).resolve() if name else page
        assert to.exists(), link
        assert not anchor or anchor in anchors(to), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_fit_a_screen(page):
    fenced = False
    for line in page.read_text().splitlines():
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not line.startswith(("|", "    ")):
            assert len(line) <= WIDTH, line


def test_the_index_names_every_page():
    docs = ROOT / "docs"
    index, log = links(docs / "README.md"), links(docs / "log" / "README.md")
    for page in docs.glob("*.md"):
        assert page.name == "README.md" or page.name in index, page.name
    for page in (docs / "log").glob("*.md"):
        assert page.name == "README.md" or page.name in log, page.name
