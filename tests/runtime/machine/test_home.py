"""A user without a home."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from windlass.cli import execute

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("words", [["models"], ["plan", "GLM-4.5-Air", "--on", "1xH200"], ["ps"]])
def test_commands_need_none(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`docker run --user 12345`: no HOME, and nobody of that number."""
    expanded = os.path.expanduser
    monkeypatch.setattr(os.path, "expanduser", lambda path: expanded(path) if "HOME" in os.environ else path)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "WINDLASS_CACHE", "WINDLASS_JOBS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="home"):
        Path.home()
    assert execute(words) == 0 and capsys.readouterr().err == ""
    assert Path.home() == Path("/")
