"""Tells text from other bytes, so that no binary file becomes training tokens. Pure.

A file is UTF-8, or has a byte order mark that says what it is. One byte that does not decode, one NUL, or many control characters: not text.
"""

from __future__ import annotations

import codecs

from windlass.tasks.train.data.prepare.quality import CONTROL

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SIGNATURES = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "Zstandard"),
    (b"PK\x03\x04", "ZIP"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"%PDF-", "PDF"),
    (b"PAR1", "Parquet"),
    (b"\x7fELF", "ELF (a program)"),
    (b"\x89PNG", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
)
"""First bytes of formats that are taken for text by their name."""
MOST_CONTROL = 0.1
"""Share of control characters. Random bytes have 0.2 and more; terminal logs, whose escape is not counted, far less than 0.01."""
FEWEST_CONTROL = 8
"""A short text may have a few."""


class NotText(ValueError):
    """Its message says what was found, and at which byte."""


def signature(first_bytes: bytes) -> str | None:
    """The format whose files begin so; None: none that is known."""
    return next((name for mark, name in _SIGNATURES if first_bytes.startswith(mark)), None)


def decoded(content: bytes) -> str:
    """The text of a file. Raises NotText."""
    encoding = next((name for mark, name in _MARKS if content.startswith(mark)), "utf-8")
    if encoding.startswith("utf-8") and (place := content.find(0)) >= 0:
        raise NotText(f"is not text: byte {place:,} is NUL{_looks_like(content) or ' (UTF-16 needs a byte order mark)'}")
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        raise NotText(_undecodable(content, encoding, error)) from None
    if (place := text.find("\0")) >= 0:
        raise NotText(f"is not text: it has a NUL character at {_offset(text, place, encoding)}")
    if (why := too_many_controls(text, encoding)) is not None:
        raise NotText(why)
    return text


def _looks_like(content: bytes) -> str:
    name = signature(content)
    return f"; it begins like {name} data, which must be unpacked or converted first" if name else ""


def _undecodable(content: bytes, encoding: str, error: UnicodeDecodeError) -> str:
    shown, place = encoding.removesuffix("-sig").upper(), error.start + 3 * (encoding == "utf-8-sig")
    what = f"is not {shown} text: byte {place:,} is 0x{content[place]:02x} ({error.reason})"
    return what + (_looks_like(content) or "; convert it to UTF-8, for example with iconv")


def too_many_controls(text: str, encoding: str = "") -> str | None:
    """Why a text is none, by its share of control characters. `encoding`: of its file, so that the place is a byte; else a character."""
    first = CONTROL.search(text)
    if first is None:
        return None
    found = sum(1 for _ in CONTROL.finditer(text, first.start()))
    if found < FEWEST_CONTROL or found < MOST_CONTROL * len(text):
        return None
    where = _offset(text, first.start(), encoding) if encoding else f"character {first.start():,}"
    return f"is not text: {found / len(text):.0%} of its characters are control characters, the first at {where}"


def _offset(text: str, place: int, encoding: str) -> str:
    """`byte N` of the file: what stands before, encoded again (a mark is as long as the encoder's own)."""
    return f"byte {len(text[:place].encode(encoding)):,}"
