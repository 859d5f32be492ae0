"""What is installed under which name: `windlass` on the package index is another project, so nothing here may tell people to install it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from windlass.errors import DISTRIBUTION

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
TEXTS = re.compile(r".*\.(?:md|py|toml|yml|cfg|service|sh|js|html)|Makefile|Dockerfile.*")
SKIPPED = {".venv", ".venv-harness", ".venv-clients", ".git", "build", "dist", "out"}
OTHERS = re.compile(
    r"(?:pip[3]?|uv|pipx|uvx)\s[^\n`&;|]*?(?<![\w./-])windlass(?![\w./-])"  # pip install windlass
    r"|(?<![\w.-])windlass\[[a-z]"  # windlass[run]
    r"|\bwindlass\s*(?:==|>=|~=)\s*\d"
)


def texts() -> list[Path]:
    found: list[Path] = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [
            name for name in folders if name not in SKIPPED
        ]  # not even looked into: .venv has tens of thousands of files
        found += [Path(folder, name) for name in files if TEXTS.fullmatch(name)]
    return sorted(path for path in found if path != Path(__file__))


def test_texts_of_every_kind_are_read() -> None:
    names = {path.name for path in texts()}
    assert {"README.md", "conftest.py", "pyproject.toml", "Makefile"} <= names
    assert Path(__file__) not in texts()


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


def test_git_ignores_nothing_of_the_package() -> None:
    """Wheels leave out what git ignores, also what is tracked: the bundled model's weights, say, whose suffix is ignored elsewhere."""
    if shutil.which("git") is None:
        pytest.skip("no git")
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--ignored", "--exclude-standard", "src"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"no checkout that git reads: {found.stderr.strip()}")
    assert found.stdout == ""
