"""Workers from this side: the process that forks them, and one that is asked and killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from windlass.core.ranks.frames import FrameReader, frame
from windlass.model.text.isolated.jobs import Answer, Task
from windlass.model.text.isolated.process import QUICK, SLOW, VOCABULARY, Vocabulary

READ_BYTES = 2**18
MAX_ANSWER_BYTES = 2**28


class Workers:
    """The process that forks workers, started with the first of them."""

    def __init__(self, vocabulary: Callable[[], Vocabulary] | None = None) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._vocabulary = vocabulary
        self._is_taught = False
        self.has_compiled = False
        """A grammar, with this tokenizer: if the process ends now, it is not the tokenizer's fault."""

    @property
    def is_started(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """It imports its libraries while something else goes on."""
        if self._process is not None and self._is_taught and not self.has_compiled:
            self._vocabulary = None
        self.close()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "windlass.model.text.isolated.process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what Rust prints before it ends a process
                pass_fds=[theirs.fileno()],
                process_group=0,
                # One arena: those of other threads take address space, which is limited, and hold nothing.
                env=os.environ | {"MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            )
        self._is_taught = False

    def teach(self) -> bool:
        """Sends the tokenizer once; workers that are started from now on can compile grammars. True: it was sent now."""
        if not self.is_started:
            self.start()
        if self._is_taught or self._vocabulary is None or self._control is None:
            return False
        descriptor = os.memfd_create("tokenizer")
        with os.fdopen(descriptor, "wb") as file, contextlib.suppress(OSError):
            file.write(msgspec.msgpack.encode(self._vocabulary()))
            file.flush()
            self._send(VOCABULARY, descriptor)
        self._is_taught = True
        return True

    def another(self, is_slow: bool) -> Worker:
        if not self.is_started:
            self.start()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                self._send(SLOW if is_slow else QUICK, theirs.fileno())
            except OSError:  # it has ended, whatever the reason: once more
                was_taught = self._is_taught
                self.start()
                if was_taught:
                    self.teach()
                self._send(SLOW if is_slow else QUICK, theirs.fileno())
        return Worker(ours)

    def close(self) -> None:
        """Workers that are busy end by themselves, at their limit."""
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    def _send(self, kind: bytes, descriptor: int) -> None:
        assert self._control is not None
        socket.send_fds(self._control, [kind], [descriptor])


class Worker:
    """One process, one job at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.setblocking(False)
        self._frames, self._pid = FrameReader(MAX_ANSWER_BYTES), 0
        self._waiting: list[bytes] = []

    @property
    def has_ended(self) -> bool:
        """Between two jobs."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    async def ask(self, task: Task) -> Answer | None:
        """None: it ended, at its limit of time or memory or by a fault of a library."""
        try:
            await asyncio.get_running_loop().sock_sendall(self._connection, frame(msgspec.json.encode(task)))
            if not self._pid:
                self._pid = int(await self._frame())
            return msgspec.json.decode(await self._frame(), type=Answer)
        except (OSError, EOFError):
            return None

    async def _frame(self) -> bytes:
        while not self._waiting:
            data = await asyncio.get_running_loop().sock_recv(self._connection, READ_BYTES)
            if not data:
                raise EOFError
            self._waiting += self._frames.push(data)
        return self._waiting.pop(0)

    def close(self) -> None:
        """In the midst of a job too."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, signal.SIGKILL)
        self._connection.close()
