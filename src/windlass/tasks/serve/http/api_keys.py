"""API keys: read at startup, and compared with a request's in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any, cast

import msgspec

from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.tasks.serve.api_key import ApiKey, check_secret

ENVIRONMENT = "WINDLASS_API_KEY"
MAX_FILE_BYTES = 2**20
SUFFIX = re.compile(r"\.(txt|keys?|pem|conf|cfg|env|ini|json|toml|ya?ml|secrets?|lst|list)$", re.IGNORECASE)
Headers = Iterable[tuple[bytes, bytes]]


def key_number(headers: Headers, keys: Sequence[ApiKey]) -> int | None:
    """The index of the matching key, from 1; 0 if the server has no keys; None if none matches. Every key is compared, so timing reveals nothing."""
    if not keys:
        return 0
    sent = hashlib.sha256(_sent_key(headers)).digest()
    found = None
    for number, key in enumerate(keys, 1):
        if hmac.compare_digest(sent, key.digest):
            found = number
    return found


def _sent_key(headers: Headers) -> bytes:
    """`Authorization: Bearer KEY`, or Anthropic's `x-api-key: KEY`."""
    found = dict(headers)
    scheme, _, key = found.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else found.get(b"x-api-key", b"").strip()


def read_keys(option: str | None, environment: Mapping[str, str] = os.environ) -> tuple[ApiKey | str, ...]:
    """`option`: a key, a file with one key per line (# starts a comment), or a TOML file with names and limits; None: the environment
    variable."""
    given = environment.get(ENVIRONMENT, "") if option is None else option
    if option is not None and not option:
        raise BadInput("--api-key is empty; give a key, or a file with one key per line")
    if given.endswith(".toml") and _is_file(given):
        return _toml_keys("\n".join(_file_lines(given)))
    lines = _file_lines(given) if _is_file(given) else _inline_keys(given)
    keys = tuple(dict.fromkeys(line.strip() for line in lines if line.strip() and not line.strip().startswith("#")))
    if given and not keys:
        raise BadInput("the --api-key file contains no key; write one key per line")
    for key in keys:
        check_secret(key)
    return keys


class _KeyFile(Frozen, forbid_unknown_fields=True):
    key: tuple[ApiKey, ...]


def _with_times(value: Any) -> Any:
    """A date is the beginning of its day."""
    if isinstance(value, dict):
        return {key: _with_times(item) for key, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_with_times(item) for item in cast(list[Any], value)]
    is_day = isinstance(value, date) and not isinstance(value, datetime)
    return datetime.combine(value, time(), UTC) if is_day else value


def _toml_keys(text: str) -> tuple[ApiKey, ...]:
    """Messages must not quote a key."""
    try:
        found = msgspec.convert(_with_times(tomllib.loads(text)), _KeyFile)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInput(f"the --api-key file is not valid TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise BadInput(f"the --api-key file is invalid: {error}; each [[key]] has a name, a key or sha256, and limits") from None
    if not found.key:
        raise BadInput("the --api-key file contains no key; write a [[key]] with name and key")
    return found.key


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
