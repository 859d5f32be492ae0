"""The secret that root and workers share: a private file of at least 16 bytes."""

from __future__ import annotations

import stat
from pathlib import Path

from windlass.errors import BadInput

MIN_BYTES, MAX_BYTES = 16, 4096
CREATE = "head -c 32 /dev/urandom | base64 > {file} && chmod 600 {file}"


def read_secret(file: Path) -> bytes:
    """Stripped, so that a trailing newline makes no difference."""
    try:
        with file.open("rb") as opened:
            found = opened.read(MAX_BYTES + 1).strip()
    except FileNotFoundError:
        raise BadInput(
            f"there is no secret file {file}; create one and copy it to all machines: {CREATE.format(file=file)}"
        ) from None
    except OSError as error:
        raise BadInput(f"the secret file {file} cannot be read: {error.strerror}") from None
    if len(found) < MIN_BYTES:
        raise BadInput(
            f"the secret in {file} has {len(found)} bytes, fewer than {MIN_BYTES}; create another: {CREATE.format(file='secret')}"
        )
    if len(found) > MAX_BYTES:
        raise BadInput(f"{file} has more than {MAX_BYTES} bytes, so it is no secret; check that it is the right file")
    return found


def warning(file: Path) -> str:
    """Empty if only its owner can read the file."""
    mode = stat.S_IMODE(file.stat().st_mode)
    if not mode & (stat.S_IRWXG | stat.S_IRWXO):
        return ""
    return f"{file} can be read by other users of this machine (mode {mode:03o}); chmod 600 {file}"
