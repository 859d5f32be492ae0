"""Memory read bandwidth of this machine, measured in about 0.1 s. The best reading since boot is kept: other work makes memory seem slower,
never faster.

`memchr` for an absent byte is a pure read, vectorized in every C library, and ctypes releases the GIL, so plain threads suffice.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.model import Frozen
from windlass.units import MIB

TOTAL_BYTES, CACHE_TIMES = 128 * MIB, 4
"""Divided among the threads: at least so much, and so many times the L3 cache; less was read from the cache of a server (252 GB/s of 140)."""

MIN_BYTES_PER_THREAD, MAX_BYTES_PER_THREAD = 16 * MIB, 128 * MIB
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
USUAL_SECOND_LEVEL = MIB
"""Of a server's core, where the system does not tell."""
MAX_THREADS = 64
"""Enough to saturate two sockets."""

SECONDS = 0.03
AGAIN_SECONDS = 600.0
"""After so long it is measured again."""
PLAUSIBLE = (1e9, 5e12)
"""Bytes per second; results outside are measurement errors."""

Span = tuple[float, float, int]
"""Start and end in seconds, bytes read."""
Scan = Callable[[int, int, int], object]


class CachedBandwidth(Frozen):
    key: str
    read_bandwidth: float
    measured_at: float = 0.0
    """Seconds since 1970, of the last reading."""


def read_bandwidth(num_cores: int, key: str) -> float | None:
    """Bytes per second, cached under `key`; None if it cannot be measured."""
    path = cache_path(dict(os.environ), Path.home())
    found, now = read_cache(path, key), time.time()
    if found is not None and 0 <= now - found.measured_at < AGAIN_SECONDS:
        return found.read_bandwidth
    best = max((each for each in (measure(num_cores), found and found.read_bandwidth) if each), default=None)
    if best is not None:
        write_cache(path, CachedBandwidth(key=key, read_bandwidth=best, measured_at=now))
    return best


def cache_path(environment: dict[str, str], home: Path) -> Path:
    base = environment.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else home / ".cache") / "windlass" / "machine.json"


def read_cache(path: Path, key: str) -> CachedBandwidth | None:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=CachedBandwidth)
    except (OSError, *DECODE_ERRORS):  # absent, unreadable, or written by another version
        return None
    return found if found.key == key and PLAUSIBLE[0] <= found.read_bandwidth <= PLAUSIBLE[1] else None


def write_cache(path: Path, value: CachedBandwidth) -> None:
    """Written atomically, by rename. Failure to write is ignored."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.encode(value))
        temporary.replace(path)
    except OSError:
        return


def measure(num_cores: int) -> float | None:
    """With all cores reading their own buffers; rounded to 0.1 GB/s."""
    scan = _memchr()
    num_threads = min(num_cores, MAX_THREADS)
    size = bytes_per_thread(num_threads, _l3_bytes())
    try:
        buffers = [mmap.mmap(-1, size) for _ in range(num_threads)]
    except (OSError, MemoryError):
        return None
    if scan is None:
        return None
    spans: list[Span] = []
    ready = threading.Barrier(num_threads)
    threads = [threading.Thread(target=_read_repeatedly, args=(scan, buffer, ready, spans)) for buffer in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _speed(spans)


def bytes_per_thread(num_threads: int, l3_bytes: int) -> int:
    """Of its own buffer."""
    total = max(TOTAL_BYTES, CACHE_TIMES * l3_bytes)
    return min(max(total // num_threads, MIN_BYTES_PER_THREAD), MAX_BYTES_PER_THREAD)


def _l3_bytes() -> int:
    """0: unknown."""
    return _cache_bytes(CACHES / "index3")


def second_level_bytes(caches: Path = CACHES) -> int:
    """Of the cache that a thread has before memory that all share: threads of one core divide it."""
    found = _cache_bytes(caches / "index2")
    try:
        return (found or USUAL_SECOND_LEVEL) // _num_listed((caches / "index2" / "shared_cpu_list").read_text())
    except (OSError, ValueError):
        return found or USUAL_SECOND_LEVEL


def _cache_bytes(folder: Path) -> int:
    try:
        text = (folder / "size").read_text().strip()
        return int(text.removesuffix("K")) * 1024 if text.endswith("K") else int(text.removesuffix("M")) * MIB
    except (OSError, ValueError):
        return 0


def _num_listed(text: str) -> int:
    """Of numbers and ranges: 0-1,16."""
    ends = [part.split("-") for part in text.strip().split(",")]
    return max(1, sum(int(part[-1]) - int(part[0]) + 1 for part in ends))


def _speed(spans: list[Span]) -> float | None:
    seconds = max(end for _, end, _ in spans) - min(begin for begin, _, _ in spans)
    speed = round(sum(num_bytes for _, _, num_bytes in spans) / seconds / 1e8) * 1e8
    return speed if PLAUSIBLE[0] <= speed <= PLAUSIBLE[1] else None


def _read_repeatedly(scan: Scan, buffer: mmap.mmap, ready: threading.Barrier, spans: list[Span]) -> None:
    size = len(buffer)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    ctypes.memset(address, 0, size)  # untouched pages all map to one zero page, which stays in cache
    ready.wait()
    begin, num_bytes = time.perf_counter(), 0
    while time.perf_counter() - begin < SECONDS:
        scan(address, 1, size)
        num_bytes += size
    spans.append((begin, time.perf_counter(), num_bytes))


def _memchr() -> Scan | None:
    try:
        scan = ctypes.CDLL(None).memchr
    except (OSError, TypeError, AttributeError):  # no C library under that name (Windows)
        return None
    scan.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    scan.restype = ctypes.c_void_p
    return scan
