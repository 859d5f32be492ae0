"""What is installed under which name: `windlass` on the package index is another project, so nothing here may tell people to install it."""

from __future__ import annotations

import os
import re
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from windlass.errors import DISTRIBUTION

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
TEXTS = ("*.md", "*.py", "*.toml", "*.yml", "*.cfg", "Makefile", "Dockerfile*", "*.service", "*.sh", "*.js", "*.html")
SKIPPED = {".venv", ".venv-harness", ".venv-clients", ".git", "build", "dist", "out"}
OTHERS = re.compile(
    r"(?:pip[3]?|uv|pipx|uvx)\s[^\n`&;|]*?(?<![\w./-])windlass(?![\w./-])"  # pip install windlass
    r"|(?<![\w.-])windlass\[[a-z]"  # windlass[run]
    r"|\bwindlass\s*(?:==|>=|~=)\s*\d"
)


def texts() -> list[Path]:
    found: list[Path] = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in SKIPPED]  # not even listed: there may be 100,000 files in them
        found += [Path(folder, name) for name in files if any(fnmatchcase(name, pattern) for pattern in TEXTS)]
    return sorted(set(found) - {Path(__file__).resolve()})


def test_no_text_names_the_other_project() -> None:
    found = {
        str(path.relative_to(ROOT)): match[0] for path in texts() if (match := OTHERS.search(path.read_text(errors="replace")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    ["pip install windlass", "pip install -U 'windlass[run]'", "'windlass[serve]'", "windlass>=0.2", "uv tool install windlass"],
)
def test_the_other_project_would_be_seen(line: str) -> None:
    assert OTHERS.search(line)


@pytest.mark.parametrize(
    "line", ["pip install windlass-llm", "'windlass-llm[run]'", "windlass run x", "python -m pip install -e . && windlass plan"]
)
def test_ours_is_not(line: str) -> None:
    assert not OTHERS.search(line)


def test_the_name_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    assert project["scripts"] == {"windlass": "windlass.cli:main"}
    extras = [need for needs in project["optional-dependencies"].values() for need in needs if need.startswith("windlass")]
    assert extras and all(need.startswith(f"{DISTRIBUTION}[") for need in extras)


def test_the_changelog_knows_this_version() -> None:
    from windlass import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
