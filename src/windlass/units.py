"""Parsing and formatting what people write: numbers with units, and paths that begin at a home directory.

Internally sizes are plain integers of bytes. "GB" is 10^9 and "GiB" is 2^30 when read; sizes are printed in GiB and say so.
"""

from __future__ import annotations

import re
from pathlib import Path

from windlass.errors import BadInput
from windlass.foreign import shown

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12

_BYTE_UNITS = {
    "b": 1, "kb": KB, "mb": MB, "gb": GB, "tb": TB, "pb": 10**15,
    "k": KB, "m": MB, "g": GB, "t": TB,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB, "pib": 2**50,
}  # fmt: skip
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_BIT_RATES = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_NUMBER = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?(?:e\d{1,2})?)\s*([a-zA-Z]*)\s*")


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise BadInput(f"{text!r} is not {what}; write it like {example}")
    return float(match[1]), match[2]


def parse_bytes(text: str) -> int:
    """`80GB` -> 80 * 10^9, `80GiB` -> 80 * 2^30."""
    number, unit = _split(text, "a size", "80GB or 75GiB")
    if not unit:
        raise BadInput(f"{text!r} has no unit; write {text}GB, or MB, TB, MiB, GiB or TiB")
    if unit.lower() not in _BYTE_UNITS:
        raise BadInput(f"{text!r}: {unit!r} is not a unit of size; use MB, GB, TB, MiB, GiB or TiB")
    return round(number * _BYTE_UNITS[unit.lower()])


def parse_count(text: str) -> int:
    """`15T` -> 15 * 10^12; for tokens, parameters and requests."""
    number, unit = _split(text, "a count", "4096, 500B or 15T")
    if unit.lower() not in _COUNT_UNITS:
        raise BadInput(f"{text!r}: {unit!r} is not a multiplier; use k, M, B or T")
    return round(number * _COUNT_UNITS[unit.lower()])


def parse_context(text: str) -> int:
    """`8k` -> 8192: context lengths are counted in powers of two when abbreviated."""
    number, unit = _split(text, "a context length", "8192, 8k or 128k")
    factor = {"": 1, "k": 1024, "m": 1024**2}.get(unit.lower())
    if factor is None:
        raise BadInput(f"{text!r}: {unit!r} is not a multiplier of a context; use k or M")
    return round(number * factor)


def parse_bit_rate(text: str) -> float:
    """`400Gb` or `400Gb/s` -> bytes per second (links are sold in bits)."""
    number, unit = _split(text.removesuffix("/s").removesuffix("ps"), "a link speed", "400Gb or 1Gb")
    if unit.lower() not in _BIT_RATES:
        raise BadInput(f"{text!r}: {unit!r} is not a unit of link speed; use Mb, Gb or Tb (bits per second)")
    return number * _BIT_RATES[unit.lower()] / 8


_TIME_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def parse_time(text: str) -> int:
    """`24h`, `1h30m`, `2d`, or as schedulers write it: `1-12:00:00`, `02:30:00` -> seconds."""
    clock = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,3}):(\d\d)(?::(\d\d))?", text.strip())
    if clock is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    parts = re.findall(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|m|h|d)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text.replace(" ", ""):
        raise BadInput(f"{text!r} is not a time; write it like 24h, 1h30m, 90min or 1-12:00:00")
    return round(sum(float(number) * _TIME_UNITS[unit] for number, unit in parts))


def parse_path(text: str | Path) -> Path:
    """With the home directory in the place of `~` and `~name`."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # its own words name neither
        raise BadInput(f"{shown(text)}: nobody of that name has a home directory here; write the path in full") from None


def format_bytes(num_bytes: float) -> str:
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}" if size > MIB else f"{num_bytes / size:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(number: float) -> str:
    """1,500,000,000 -> `1.50B`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            digits = 2 if abs(number) < 100 * size else 1
            return f"{number / size:.{digits}f}{unit}"
    return f"{number:.0f}"


def format_rate(per_second: float) -> str:
    """Tokens per second: 0.907, 36.8, 366, 18,635."""
    if per_second >= 100:
        return f"{per_second:,.0f}"
    return f"{per_second:.3g}"


def format_bandwidth(bytes_per_second: float) -> str:
    """`2.50 GB/s`, `20 MB/s`, `2.4 MB/s`"""
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.2f} GB/s"
    return f"{bytes_per_second / 1e6:.0f} MB/s" if bytes_per_second >= 1e7 else f"{bytes_per_second / 1e6:.1f} MB/s"


def format_context(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"


def format_seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 3 * 86400 else f"{seconds / 86400:.1f} days"
