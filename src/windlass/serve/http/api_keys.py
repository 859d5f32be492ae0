"""Who may ask: the key in a request's headers against those of the server, in a time that tells nothing about them."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from windlass.errors import BadInput
from windlass.serve.settings import check_key

ENVIRONMENT = "WINDLASS_API_KEY"
MAX_FILE_BYTES = 2**20
SUFFIX = re.compile(r"\.(txt|keys?|pem|conf|cfg|env|ini|json|toml|ya?ml|secrets?|lst|list)$", re.IGNORECASE)
Headers = Iterable[tuple[bytes, bytes]]


def key_number(headers: Headers, keys: tuple[str, ...]) -> int | None:
    """Which of the keys it is, from 1; 0 where none is needed; None: none of them. Every key is compared, whichever is right."""
    if not keys:
        return 0
    given = _given(headers)
    found = None
    for number, key in enumerate(keys, 1):
        if hmac.compare_digest(given, key.encode()):
            found = number
    return found


def _given(headers: Headers) -> bytes:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else b""
    return b""


def read_keys(word: str | None, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """From the command line (a key, or a file with one a line), else from the environment; lines that begin with # are remarks."""
    given = environment.get(ENVIRONMENT, "") if word is None else word
    if word is not None and not word:
        raise BadInput("--api-key is empty; give a key, or a file with one a line")
    lines = _file_lines(given) if _is_file(given) else _words(given)
    keys = tuple(dict.fromkeys(line.strip() for line in lines if line.strip() and not line.strip().startswith("#")))
    if given and not keys:
        raise BadInput("--api-key names a file without a key in it; write one a line")
    for key in keys:
        check_key(key)
    return keys


def _words(given: str) -> list[str]:
    """A file's name that is mistyped must not become the key, which everybody could guess."""
    if "/" in given or given.startswith(("~", ".")) or SUFFIX.search(given):
        raise BadInput(
            "--api-key looks like a file, and there is none of that name; write a key like this into a file and name that"
        )
    return given.split()


def _is_file(word: str) -> bool:
    try:
        return bool(word) and Path(word).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        return False


def _file_lines(word: str) -> list[str]:
    path = Path(word).expanduser()
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadInput("the file of API keys is over 1 MiB; it should have one key a line")
        return path.read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise BadInput(f"the file of API keys cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput("the file of API keys has other characters than ASCII in it") from None
