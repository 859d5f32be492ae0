"""The docs stand on three shelves: a short start, short guides, and reference. What keeps the first two short, and every guide findable."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
MOST_WORDS = 1200
MOST_README_LINES = 80
BLOCK = re.compile(r"^([ \t]*)```.*?^\1```", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"!\[[^]]*\]\(([^)]+)\)")
HARDWARE = re.compile(r"\b(CPU|CPUs|GPU|GPUs|Hopper|H200|x86-64|hardware)\b")
LONGEST_CELL = 90


def words(text: str) -> int:
    """Outside code blocks."""
    return len(BLOCK.sub("", text).split())


def opening(text: str) -> str:
    """The first paragraph after the title, empty if something else stands there."""
    first = text.split("\n\n")[1].strip()
    return "" if first.startswith(("```", "#", "|", "!", "-")) else first


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[a-z)`])\. ", opening(text).replace("\n", " "))[0]


def cells(text: str) -> list[str]:
    """Of the tables, as a reader sees them: a link is its text."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).strip() for row in rows for cell in row.strip("|").split("|")]


def test_the_readme_is_short_and_has_two_pictures() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= MOST_README_LINES
    assert all((ROOT / picture).is_file() for picture in IMAGE.findall(text))
    assert len(IMAGE.findall(text)) == 2


def test_a_cell_of_the_readme_is_one_line() -> None:
    assert [cell for cell in cells((ROOT / "README.md").read_text()) if len(cell) > LONGEST_CELL] == []


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_a_guide_is_short(guide: Path) -> None:
    assert words(guide.read_text()) <= MOST_WORDS


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_the_first_sentence_says_on_which_hardware(guide: Path) -> None:
    sentence = first_sentence(guide.read_text())
    assert HARDWARE.search(sentence), sentence


def test_the_index_links_every_guide_and_task() -> None:
    linked = set(re.findall(r"\]\(((?:guides|tasks)/[^)#]+)", (ROOT / "docs" / "index.md").read_text()))
    pages = [*GUIDES, *(ROOT / "docs" / "tasks").glob("*.md")]
    assert linked == {str(page.relative_to(ROOT / "docs")) for page in pages}


def test_pictures_load_nothing_from_elsewhere() -> None:
    for picture in (ROOT / "docs" / "images").glob("*.svg"):
        assert not re.search(r"(?:url\(|href=|src=)[\"']?https?:", picture.read_text()), picture.name


def test_words_in_code_blocks_do_not_count() -> None:
    assert words("# A\n\none two\n\n```sh\nnot these words\n```\n\nthree") == 5


@pytest.mark.parametrize("text", ["# A\n\n```\nx\n```\n", "# A\n\n## B\n\nCPU\n", "# A\n\n| a |\n"])
def test_a_page_that_begins_otherwise_has_no_first_sentence(text: str) -> None:
    assert first_sentence(text) == ""


def test_the_site_has_three_shelves() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert re.findall(r"^  - (\w+):$", navigation, re.MULTILINE) == ["Start", "Guides", "Reference"]
