"""A Chromium for tests of pages, if there is one that starts."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

NEEDED = "needs Chromium: apt-get install chromium"


@cache
def chromium() -> str | None:
    """Its path. Some systems have a program of that name that only says how to install it."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if path and subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            return path
    return None
