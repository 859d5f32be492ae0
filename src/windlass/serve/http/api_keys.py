"""API keys: read at startup, and compared with a request's in constant time."""

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
    """The index of the matching key, from 1; 0 if the server has no keys; None if none matches. Every key is compared, so timing reveals nothing."""
    if not keys:
        return 0
    token = _bearer_token(headers)
    found = None
    for number, key in enumerate(keys, 1):
        if hmac.compare_digest(token, key.encode()):
            found = number
    return found


def _bearer_token(headers: Headers) -> bytes:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else b""
    return b""


def read_keys(option: str | None, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """`option`: a key, or a file with one key per line (# starts a comment); None: the environment variable."""
    given = environment.get(ENVIRONMENT, "") if option is None else option
    if option is not None and not option:
        raise BadInput("--api-key is empty; give a key, or a file with one key per line")
    lines = _file_lines(given) if _is_file(given) else _inline_keys(given)
    keys = tuple(dict.fromkeys(line.strip() for line in lines if line.strip() and not line.strip().startswith("#")))
    if given and not keys:
        raise BadInput("the --api-key file contains no key; write one key per line")
    for key in keys:
        check_key(key)
    return keys


def _inline_keys(given: str) -> list[str]:
    """A mistyped file name must not become an API key that anybody could guess."""
    if "/" in given or given.startswith(("~", ".")) or SUFFIX.search(given):
        raise BadInput(
            "--api-key looks like a file, but there is no such file; check the path, or put a key that looks like a path into a file"
        )
    return given.split()


def _is_file(path: str) -> bool:
    try:
        return bool(path) and Path(path).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        return False


def _file_lines(name: str) -> list[str]:
    path = Path(name).expanduser()
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadInput("the --api-key file is larger than 1 MiB; it should have one key per line")
        return path.read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise BadInput(f"cannot read the --api-key file: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput("the --api-key file contains non-ASCII characters") from None
