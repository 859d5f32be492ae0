"""The documentation as a site: every page is in the navigation, and it builds where mkdocs is installed (`make docs`)."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
NOT_SHOWN = {"log.md"}


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert listed == pages - NOT_SHOWN


@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed; CI builds the site with `make docs`"
)
def test_the_site_builds(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tasks" / "serve-a-team" / "index.html").is_file()


def test_the_unit_and_the_images_name_what_exists() -> None:
    unit = (ROOT / "deploy" / "windlass-serve.service").read_text()
    assert "windlass serve ${MODEL}" in unit and "TimeoutStopSec=60" in unit
    for name in ("Dockerfile", "Dockerfile.cuda"):
        text = (ROOT / "deploy" / name).read_text()
        copied = {word for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE) for word in line.split()[:-1]}
        assert copied and all((ROOT / path).exists() for path in copied)
        assert re.search(r'^ENTRYPOINT \["windlass"\]$', text, re.MULTILINE)
