"""Docs that are true: every path, module and command that README, docs and docstrings name exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "windlass"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
]
HISTORY = {ROOT / "docs" / "log.md"}
"""Says what was so at its time."""

PATH = re.compile(r"(?<![\w./@~-])((?:[a-z_0-9-]+/)+[a-z_0-9-]+\.(?:py|toml|md|cpp|cu|h|js|json|png))\b")
MODULE = re.compile(r"\bwindlass(?:\.[a-z_]+)+")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
COMMAND = re.compile(r"(?:`|^\$ |^)windlass ([a-z]+)", re.MULTILINE)
OURS = frozenset(
    folder.name
    for base in (ROOT, SRC, *(SRC / name for name in ("model", "runtime", "tasks")))
    for folder in base.iterdir()
    if folder.is_dir()
)
"""A path that begins with none of these is an example's, or of somebody else's repository."""


def missing_paths(text: str, page: Path) -> Iterator[str]:
    """A path may be meant from the repository's root, from src/windlass, or from the page's own folder."""
    for found in PATH.findall(text):
        if _is_ours(found) and not any((base / found).exists() for base in (ROOT, SRC, page.parent)):
            yield found


def _is_ours(path: str) -> bool:
    """Other projects have folders `src` and `docs` too; ours are src/windlass, and docs with its guides and reference."""
    first, *rest = path.split("/")
    return (
        first in OURS
        and (first != "src" or rest[0] == "windlass")
        and (first != "docs" or len(rest) == 1 or rest[0] in ("guides", "reference"))
    )


def missing_modules(text: str) -> Iterator[str]:
    for found in MODULE.findall(text):
        parts = found.split(".")[1:]
        if not any(_is_module(parts[:count]) for count in range(len(parts), max(len(parts) - 2, 0), -1)) and parts != ["json"]:
            yield found


def _is_module(parts: list[str]) -> bool:
    place = SRC.joinpath(*parts)
    return place.is_dir() or place.with_suffix(".py").is_file()


def docstrings(source: str) -> str:
    return "\n".join(
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY], ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    assert sorted(set(missing_paths(text, page))) == []
    assert sorted(set(missing_modules(text))) == []
    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []


def test_what_docstrings_name_exists() -> None:
    missing = {str(file.relative_to(SRC)): found for file in sorted(SRC.rglob("*.py")) if (found := missing_in_docstrings(file))}
    assert missing == {}


def missing_in_docstrings(file: Path) -> list[str]:
    """Where the file as a whole names nothing that is missing, it need not be parsed."""
    source = file.read_text()
    return sorted(set(missing_paths(docstrings(source), file))) if any(missing_paths(source, file)) else []


def test_a_path_in_a_docstring_that_is_not_there_is_caught(tmp_path: Path) -> None:
    (file := tmp_path / "a.py").write_text('"""See runtime/engine/no_such_file.py."""\nOTHER = "runtime/engine/nor_this.py"\n')
    assert missing_in_docstrings(file) == ["runtime/engine/no_such_file.py"]


def test_commands_exist() -> None:
    from windlass.cli.app import app

    commands = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    named = {found for page in PAGES if page not in HISTORY for found in COMMAND.findall(page.read_text())}
    planned = {"top", "eval", "route", "observe"}
    assert named & commands, "the pattern still finds commands"
    assert named - commands - planned == set()


@pytest.mark.parametrize("text", ["see `runtime/engine/no_such_file.py`", "[x](docs/none.md) docs/none.md", "core/none.toml"])
def test_a_path_that_is_not_there_is_caught(text: str) -> None:
    assert list(missing_paths(text, ROOT / "README.md"))


def test_a_module_that_is_not_there_is_caught() -> None:
    assert list(missing_modules("`windlass.runtime.engine.no_such.module.thing`")) and not list(
        missing_modules("windlass.core.model.MoE")
    )
