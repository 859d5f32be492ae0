"""The secret that root and workers share: a file of at least sixteen bytes, which is nobody else's to read."""

from __future__ import annotations

import stat
from pathlib import Path

from windlass.errors import BadInput

MIN_BYTES, MAX_BYTES = 16, 4096
HOW = "head -c 32 /dev/urandom | base64 > {file} && chmod 600 {file}"


def read_secret(file: Path) -> bytes:
    """Without the line's end, so that it does not matter how it was copied."""
    try:
        with file.open("rb") as opened:
            found = opened.read(MAX_BYTES + 1).strip()
    except FileNotFoundError:
        raise BadInput(f"there is no secret file {file}; make one for all machines: {HOW.format(file=file)}") from None
    except OSError as error:
        raise BadInput(f"the secret file {file} cannot be read: {error.strerror}") from None
    if len(found) < MIN_BYTES:
        raise BadInput(
            f"the secret in {file} has {len(found)} bytes, fewer than {MIN_BYTES}; make another: {HOW.format(file='secret')}"
        )
    if len(found) > MAX_BYTES:
        raise BadInput(f"{file} has more than {MAX_BYTES} bytes, which is no secret; is it the right file?")
    return found


def warning(file: Path) -> str:
    """Empty where the file is its owner's alone."""
    mode = stat.S_IMODE(file.stat().st_mode)
    if not mode & (stat.S_IRWXG | stat.S_IRWXO):
        return ""
    return f"{file} can be read by others on this machine (mode {mode:03o}); chmod 600 {file}"
