"""The page's files, read once into memory. Pure but for that reading: knows no HTTP server.

Every file but the page itself lies under a folder named for the contents of them all. So a browser may keep them for ever,
modules find one another by relative names, and another release is another folder.
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
"""Where the page itself names the folder."""

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
    zipped: bytes
    etag: str


@dataclass(frozen=True)
class Assets:
    index: Asset
    folder: str
    """The last part of the folder's address, named for the contents."""
    files: MappingProxyType[str, Asset]


def _asset(name: str, body: bytes) -> Asset:
    # mtime=0: the same bytes on every machine and every start.
    zipped = gzip.compress(body, 9, mtime=0)
    return Asset(MEDIA_TYPES[Path(name).suffix], body, zipped, f'"{_digest(body)}"')


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]


def read_assets(static: Path = STATIC) -> Assets:
    bodies = {path.name: path.read_bytes() for path in sorted(static.iterdir()) if path.suffix in MEDIA_TYPES}
    page = bodies.pop(INDEX)
    folder = _digest(b"".join(name.encode() + b"\0" + body + b"\0" for name, body in bodies.items()))
    index = _asset(INDEX, page.replace(FOLDER_MARK, folder.encode()))
    return Assets(index, folder, MappingProxyType({name: _asset(name, body) for name, body in bodies.items()}))
