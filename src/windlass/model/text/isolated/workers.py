"""Workers from this side: the process that forks them, and one that is asked and killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys

import msgspec

from windlass.core.client import Busy
from windlass.core.ranks.frames import FrameReader, frame
from windlass.model.text.isolated.jobs import Answer, Task
from windlass.model.text.isolated.limits import helper_environment
from windlass.model.text.isolated.process import QUICK, SLOW, VOCABULARY

READ_BYTES = 2**18
MAX_ANSWER_BYTES = 2**28
OWN_ENDS = frozenset((signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))
"""How a process ends that makes a tokenizer which is more than it can bear. Other signals come from outside."""
MOST_OWN_ENDS = 2
"""After which the tokenizer is not tried again."""


class Lost(Busy):
    """A worker ended through no fault of its job: before it had it, or with the process that forks workers."""


class Workers:
    """The process that forks workers: started with the first of them, and again whenever it has ended."""

    def __init__(self, vocabulary: bytes = b"") -> None:
        """`vocabulary`: a packed Vocabulary, for workers that compile grammars."""
        self._vocabulary, self._num_own_ends = vocabulary, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.has_compiled = False
        """A grammar, with this tokenizer: if the process ends now, it is not the tokenizer's fault."""

    @property
    def is_started(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """It imports its libraries, and makes the tokenizer, while something else goes on."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, contextlib.ExitStack() as undone:
            undone.callback(ours.close)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "windlass.model.text.isolated.process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what Rust prints before it ends a process
                pass_fds=[theirs.fileno()],
                process_group=0,
                env=helper_environment(),
            )
            undone.pop_all()
        self._control = ours
        if self._vocabulary:
            self._teach()

    def another(self, is_slow: bool) -> Worker:
        """Busy: there is no room for one."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs, contextlib.ExitStack() as undone:
                undone.callback(ours.close)
                self._send(SLOW if is_slow else QUICK, theirs.fileno())
                undone.pop_all()
        except OSError as error:
            raise Busy(f"no process for constraints and chats could be started: {error}; retry in a moment") from None
        assert self._process is not None
        return Worker(ours, self._process)

    def close(self) -> None:
        """Workers that are busy end by themselves, at their limit."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    def _send(self, kind: bytes, descriptor: int) -> None:
        """Once more where the process has ended, whatever the reason."""
        try:
            self._send_once(kind, descriptor)
        except BlockingIOError:  # it has much to do, and has not ended
            raise
        except OSError:
            self._end()
            self._send_once(kind, descriptor)

    def _send_once(self, kind: bytes, descriptor: int) -> None:
        if self._process is None:
            self.start()
        assert self._control is not None
        socket.send_fds(self._control, [kind], [descriptor])

    def _teach(self) -> None:
        with os.fdopen(os.memfd_create("tokenizer"), "wb") as file:
            file.write(self._vocabulary)
            file.flush()
            self._send_once(VOCABULARY, file.fileno())

    def _end(self) -> None:
        """Of one that has ended: its own fault, or somebody's who killed it."""
        ended = self._process
        self.close()
        if ended is not None and self._vocabulary and not self.has_compiled and -ended.returncode in OWN_ENDS:
            self._num_own_ends += 1
            self._vocabulary = self._vocabulary if self._num_own_ends < MOST_OWN_ENDS else b""


class Worker:
    """One process, one job at a time."""

    def __init__(self, connection: socket.socket, parent: subprocess.Popen[bytes]) -> None:
        self._connection, self._parent = connection, parent
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
        has_begun = False
        try:
            if not self._pid:  # before it has anything to do: who leaves can then end it
                self._pid = int(await self._frame())
            await asyncio.get_running_loop().sock_sendall(self._connection, frame(msgspec.json.encode(task)))
            has_begun = True
            return msgspec.json.decode(await self._frame(), type=Answer)
        except (OSError, EOFError):
            if not has_begun or self._parent.poll() is not None:
                raise Lost("what prepares constraints and chats was ended; retry in a moment") from None
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
