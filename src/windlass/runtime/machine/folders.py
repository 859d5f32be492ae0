"""Where Windlass keeps what it can fetch or make again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_dir(environment: Mapping[str, str] | None = None, home: Path | None = None) -> Path:
    """$WINDLASS_CACHE, else $XDG_CACHE_HOME/windlass, else ~/.cache/windlass (specifications.freedesktop.org/basedir-spec)."""
    given = os.environ if environment is None else environment
    if given.get("WINDLASS_CACHE"):
        return Path(given["WINDLASS_CACHE"])
    return Path(given.get("XDG_CACHE_HOME") or (home or Path.home()) / ".cache") / "windlass"


def ensure_home() -> None:
    """A container's user may have no home (`docker run --user 12345`). Then it is the root, as for programs that Docker starts: nothing can be
    written there, so what is kept between runs is not kept."""
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = "/"
