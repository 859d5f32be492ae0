"""HOST:PORT, read from options. Pure."""

from __future__ import annotations

from windlass.core.ranks.rendezvous import DEFAULT_PORT
from windlass.errors import BadInput

MAX_PORT = 2**16 - 1


def parse_address(text: str, option: str, default_port: int | None = None) -> tuple[str, int]:
    """`10.0.0.7:9998`, `[fd00::7]:9998`, and with a default port `10.0.0.7`. Port 0 means any free one."""
    host, colon, port = text.rpartition(":")
    if default_port is not None and (not colon or text.endswith("]")):
        host, colon, port = text, ":", str(default_port)
    bare = host.removeprefix("[").removesuffix("]")
    if (
        not colon
        or not bare
        or (":" in bare and host == bare)
        or not port.isascii()
        or not port.isdecimal()
        or int(port) > MAX_PORT
    ):
        raise BadInput(f"{option} takes HOST:PORT, as in 10.0.0.7:9998 or [fd00::7]:9998, not {text!r}")
    return bare, int(port)


def worker_address(name: str) -> tuple[str, int]:
    host, port = parse_address(name, "--workers", DEFAULT_PORT)
    if port == 0:
        raise BadInput(f"--workers: {name!r} has no port; use the HOST:PORT that `windlass worker` printed")
    return host, port


def parse_workers(text: str) -> tuple[str, ...]:
    """`a:9998,b:9998`."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise BadInput("--workers names no machine; give HOST:PORT, several separated by commas")
    if len({worker_address(name) for name in names}) < len(names):
        raise BadInput(f"--workers names a machine twice: {text}")
    return names
