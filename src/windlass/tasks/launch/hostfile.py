"""Parses a hostfile: one machine per line, as ssh knows it, with options.

# name [key=value ...]
10.0.0.7
ada@box2  port=9999 python=/opt/windlass/bin/python
box3      address=192.168.4.3 interface=eth1 cache=/data/windlass model_dir=/data/models
node001   slots=8
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.model import Frozen
from windlass.errors import BadInput, UnknownName

PORT = 9998
_TARGET = re.compile(r"(?:[A-Za-z0-9_.][\w.+-]*@)?(?:[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.]+\])")
"""Nothing that ssh would take for an option."""
_PATHS = ("python", "cache", "model_dir", "secret_file")


class SshHost(Frozen):
    name: str
    """For ssh: `box2`, `ada@10.0.0.7`."""
    address: str = ""
    """Where the root reaches it; empty: the name without the user."""
    port: int = PORT
    """Of the worker."""
    ssh_port: int | None = None
    slots: int | None = None
    """Processes or GPUs of that machine, as mpirun and DeepSpeed write it."""
    python: str = ""
    """The interpreter that has Windlass there; empty: that of --python."""
    interface: str = ""
    device: str = ""
    cache: str = ""
    cache_size: str = ""
    model_dir: str = ""
    secret_file: str = ""
    """A file on that machine; empty: the secret is sent through ssh."""

    @property
    def reached_at(self) -> str:
        return self.address or self.name.rpartition("@")[2].removeprefix("[").removesuffix("]")

    @property
    def worker(self) -> str:
        """As `--workers` wants it."""
        return join_address(self.reached_at, self.port)


KEYS = tuple(field.name for field in msgspec.structs.fields(SshHost) if field.name != "name")


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_hostfile(text: str, source: str = "the hostfile") -> tuple[SshHost, ...]:
    """Errors name the line."""
    hosts = [_host(words, f"{source}, line {number}") for number, words in _lines(text, source)]
    if not hosts:
        raise BadInput(f"{source} names no machine; write one per line, as ssh knows it")
    _check_different(hosts, source)
    return tuple(hosts)


def read_hosts(file: Path) -> str:
    try:
        return file.read_text()
    except OSError as error:
        raise BadInput(f"the hostfile {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"the hostfile {file} is not a text file") from None


def load_hostfile(file: Path) -> tuple[SshHost, ...]:
    return parse_hostfile(read_hosts(file), str(file))


def workers_of(hosts: Sequence[SshHost]) -> str:
    """The value of --workers."""
    return ",".join(host.worker for host in hosts)


def _lines(text: str, source: str) -> list[tuple[int, list[str]]]:
    found: list[tuple[int, list[str]]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise BadInput(f"{source}, line {number}: {error}; close the quote") from None
        if words:
            found.append((number, words))
    return found


def _host(words: list[str], where: str) -> SshHost:
    name, *rest = words
    if not _TARGET.fullmatch(name):
        raise BadInput(f"{where}: {name!r} is not a host; write NAME, USER@NAME or an address, then key=value")
    values: dict[str, Any] = {}
    for word in rest:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise BadInput(f"{where}: {word!r} should be key=value; keys are {', '.join(KEYS)}")
        if key not in KEYS:
            raise UnknownName(f"key in {where}", key, KEYS)
        if key in values:
            raise BadInput(f"{where}: {key} is given twice")
        values[key] = _value(key, value, f"{where}: {key}")
    return _checked(SshHost(name=name, **values), where)


def _value(key: str, value: str, what: str) -> int | str:
    if key != "slots":
        return _port(value, what) if key.endswith("port") else value
    if not value.isascii() or not value.isdecimal() or not 0 < int(value) < 100_000:
        raise BadInput(f"{what} is a number of processes, not {value!r}")
    return int(value)


def _port(text: str, what: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 65536:
        raise BadInput(f"{what} is a port, 1 to 65535, not {text!r}")
    return int(text)


def _checked(host: SshHost, where: str) -> SshHost:
    for key in _PATHS:
        if "\0" in getattr(host, key) or getattr(host, key).startswith("-"):
            raise BadInput(f"{where}: {key} is {getattr(host, key)!r}, which is not a path")
    if host.address and not _is_address(host.address):
        raise BadInput(f"{where}: address is {host.address!r}; write a name, or an address without brackets and port")
    return host


def _is_address(text: str) -> bool:
    """A host name, IPv4 or IPv6."""
    if ":" not in text:
        return re.fullmatch(r"[A-Za-z0-9_][\w.-]*", text) is not None
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _check_different(hosts: Sequence[SshHost], source: str) -> None:
    seen: set[str] = set()
    for host in hosts:
        if host.worker in seen:
            raise BadInput(f"{source} has {host.worker} twice; several workers of one machine need ports of their own (port=...)")
        seen.add(host.worker)
