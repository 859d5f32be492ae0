"""Listeners that nobody is let in by any more."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from waiting import HUNG_SECONDS
from windlass.runtime.parallel.close_listeners import close_new_listeners

pytestmark = [pytest.mark.pure, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a filter of Linux's")]


def test_what_listens_within_hears_nothing_afterwards() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        with close_new_listeners("127.0.0.1"):
            within = socket.create_server(("127.0.0.1", 0))
        with within:
            socket.create_connection(before.getsockname(), HUNG_SECONDS).close()
            with pytest.raises(OSError, match="timed out"):
                socket.create_connection(within.getsockname(), 0.3)


def test_no_descriptor_is_left_behind() -> None:
    """Most descriptors are no sockets."""
    files = [open(os.devnull) for _ in range(8)]  # noqa: SIM115, PTH123 - closed below
    try:
        count = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        for _ in range(3):
            with close_new_listeners("127.0.0.1"):
                pass
        assert len(os.listdir("/proc/self/fd")) == count  # noqa: PTH208
    finally:
        for file in files:
            file.close()
