"""The page's static files, read into memory at startup. Knows no HTTP server.

All files except index.html are served under a folder named by a hash of their contents, so browsers may cache them
indefinitely, modules import one another by relative path, and a new release is a new folder.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
FOLDER_MARK = b"@folder@"
"""Placeholder in index.html for the folder name."""

MEDIA_TYPES = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)


@dataclass(frozen=True)
class Asset:
    media_type: str
    body: bytes
    gzipped: bytes
    etag: str


@dataclass(frozen=True)
class Assets:
    index: Asset
    folder: str
    """A hash of the contents of all files."""
    files: MappingProxyType[str, Asset]
    """By path relative to the static folder, such as `chat/thread.js`."""


def _asset(name: str, body: bytes) -> Asset:
    # mtime=0 makes the bytes reproducible.
    gzipped = gzip.compress(body, 9, mtime=0)
    return Asset(MEDIA_TYPES[Path(name).suffix], body, gzipped, f'"{_digest(body)}"')


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]


def read_assets(static: Path = STATIC) -> Assets:
    paths = sorted(path for path in static.rglob("*") if path.suffix in MEDIA_TYPES)
    bodies = {path.relative_to(static).as_posix(): path.read_bytes() for path in paths}
    page = bodies.pop(INDEX)
    folder = _digest(b"".join(name.encode() + b"\0" + body + b"\0" for name, body in bodies.items()))
    index = _asset(INDEX, page.replace(FOLDER_MARK, folder.encode()))
    return Assets(index, folder, MappingProxyType({name: _asset(name, body) for name, body in bodies.items()}))
