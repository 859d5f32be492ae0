"""The processes, from inside: a parent that has imported the libraries and made the tokenizer, and forks a worker within milliseconds.

A worker is ended by the kernel when a job has used its CPU time, and gets no more memory than MEMORY_BYTES and a little above what it began with;
so no code of a library has to notice anything. The parent has no threads, so that its forks are whole. Both end when their sockets are closed.

    python -P -m windlass.model.text.isolated.process SOCKET
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, NoReturn

import msgspec

from windlass.core.ranks.frames import read_frame, write_frame
from windlass.errors import Error
from windlass.model.text.isolated.jobs import Answer, Task, done, prepare
from windlass.model.text.isolated.limits import limit_memory, size_bytes, yield_to_others

if TYPE_CHECKING:
    from llguidance import LLTokenizer

QUICK, SLOW, VOCABULARY = b"Q", b"S", b"V"
"""Messages to the parent, each with a file descriptor: a worker's socket, twice, and a file with a tokenizer."""
MEMORY_BYTES = 128 * 2**20
MEMORY_PER_BYTE = 16
"""Besides, for every byte of the job: a long chat becomes values, and a text."""
TOKENIZER_SECONDS = 60.0
"""CPU time, for a tokenizer to be made: 0.6 s of 150,000 tokens."""
TOKENIZER_BYTES = 4 * 2**30
PREPARED_SECONDS = 1.0
"""CPU time, for a template to be compiled: 0.1 s of the longest that are published. It is the model's, and none of a user's doing."""
MAX_KEPT_BYTES = 64 * 2**20
"""A worker that has grown by more is replaced."""
STACK_BYTES = 4 * 2**20
"""Less than an engine's thread has that compiles a grammar again (runtime/engine/sample/grammar.py)."""


class Vocabulary(msgspec.Struct):
    tokenizer_json: str
    stop_token_ids: list[int]


def main(control: socket.socket) -> None:
    _import_libraries()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers: the kernel forgets them
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer: LLTokenizer | Error | None = None
    gc.freeze()  # what is imported stays, and its pages stay shared
    while True:
        kind, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not kind or not descriptors:
            return
        if kind == VOCABULARY:
            tokenizer = _tokenizer(descriptors[0])
        else:
            _fork(control, descriptors[0], tokenizer, kind == SLOW)


def _import_libraries() -> None:
    for name in ("jinja2", "jinja2.ext", "jinja2.sandbox"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _tokenizer(descriptor: int) -> LLTokenizer | Error:
    """Or why there is none: told to everybody who asks for a grammar."""
    from windlass.model.text.grammar.compile import grammar_tokenizer

    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        found = msgspec.msgpack.decode(file.read(), type=Vocabulary)
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory(size_bytes() + TOKENIZER_BYTES)
    try:
        with _cpu_limit(TOKENIZER_SECONDS):
            return grammar_tokenizer(found.tokenizer_json, found.stop_token_ids)
    except Error as error:
        return error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _fork(control: socket.socket, descriptor: int, tokenizer: LLTokenizer | Error | None, is_slow: bool) -> None:
    try:
        is_worker = os.fork() == 0
    except OSError:  # no room for a process: whoever asked finds the socket closed
        is_worker = False
    if is_worker:
        control.close()
        _work(socket.socket(fileno=descriptor), tokenizer, is_slow)
    os.close(descriptor)


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Generator[None]:
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends a process that does not handle it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


# --- a worker


def _work(connection: socket.socket, tokenizer: LLTokenizer | Error | None, is_slow: bool) -> NoReturn:
    try:
        if is_slow:
            yield_to_others()
        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=_serve, args=(connection, tokenizer))
        thread.start()
        thread.join()
    finally:
        os._exit(0)  # nothing of the parent is undone


def _serve(connection: socket.socket, tokenizer: LLTokenizer | Error | None) -> None:
    write_frame(connection, str(os.getpid()).encode())
    began_bytes, is_last = size_bytes(), False
    while not is_last and (body := read_frame(connection)) is not None:
        limit_memory(began_bytes + MEMORY_BYTES + MEMORY_PER_BYTE * len(body))
        try:
            answer = _answer(msgspec.json.decode(body, type=Task), tokenizer)
        except MemoryError:
            os._exit(1)
        is_last = size_bytes() > began_bytes + MAX_KEPT_BYTES
        write_frame(connection, msgspec.json.encode(msgspec.structs.replace(answer, is_last=is_last) if is_last else answer))


def _answer(task: Task, tokenizer: LLTokenizer | Error | None) -> Answer:
    with _cpu_limit(PREPARED_SECONDS):
        prepare(task.job)
    began = time.process_time()
    with _cpu_limit(task.cpu_seconds):
        answer = done(task.job, tokenizer)
    return msgspec.structs.replace(answer, cpu_seconds=time.process_time() - began)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
