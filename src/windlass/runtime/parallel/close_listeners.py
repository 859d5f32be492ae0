"""Stops listeners that a library leaves open after its ranks have connected.

gloo listens as long as a group lives, and keeps every connection it accepts, a file descriptor each. Its listener cannot be closed from outside,
but a socket filter that drops all packets (classic BPF: man 7 socket, SO_ATTACH_FILTER) makes it unreachable. Linux only; elsewhere a no-op.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress

SO_ATTACH_FILTER = 26
"""asm-generic/socket.h"""
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""linux/filter.h: one instruction, BPF_RET | BPF_K, 0 bytes."""


@contextmanager
def close_new_listeners(host: str) -> Generator[None]:
    """On exit, listeners at `host` that were opened inside stop accepting connections."""
    before = set(_listeners(host))
    yield
    for inode, descriptor in _listeners(host).items():
        if inode not in before:
            with socket.socket(fileno=os.dup(descriptor)) as listener:
                drop_packets(listener)


def drop_packets(listener: socket.socket) -> None:
    """It stays open and receives nothing. Connections accepted before are not affected."""
    if not sys.platform.startswith("linux"):
        return
    program = ctypes.create_string_buffer(DROP_ALL)
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def _listeners(host: str) -> dict[int, int]:
    """Of this process: inode to file descriptor."""
    found: dict[int, int] = {}
    with suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
            with suppress(OSError):
                state = os.fstat(int(name))
                if stat.S_ISSOCK(state.st_mode) and _listens(int(name), host):
                    found[state.st_ino] = int(name)
    return found


def _listens(descriptor: int, host: str) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        return one.getsockname()[0] == socket.gethostbyname(host) if one.family == socket.AF_INET else True
