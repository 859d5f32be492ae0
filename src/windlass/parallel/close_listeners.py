"""Listeners that a library leaves open when they are of no use any more: nobody is let in by them from then on.

gloo listens for as long as a group lives, and keeps every connection that comes, a descriptor each. Its listener cannot be closed under it; but
a filter that keeps nothing (classic BPF: man 7 socket, SO_ATTACH_FILTER) makes the kernel drop whatever comes to it. Linux only; elsewhere
nothing is done.
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
KEEP_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)
"""linux/filter.h: one instruction, BPF_RET | BPF_K, 0 bytes."""


@contextmanager
def no_new_listeners(host: str) -> Generator[None]:
    """Listeners at `host` that were opened within are shut when all is done: whoever was to come has come."""
    before = set(_listeners(host))
    yield
    for inode, descriptor in _listeners(host).items():
        if inode not in before:
            with socket.socket(fileno=os.dup(descriptor)) as listener:
                shut(listener)


def shut(listener: socket.socket) -> None:
    """It stays open and hears nothing. Connections that it took in before go on."""
    if not sys.platform.startswith("linux"):
        return
    program = ctypes.create_string_buffer(KEEP_NOTHING)
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def _listeners(host: str) -> dict[int, int]:
    """Of this process: inode to descriptor."""
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
