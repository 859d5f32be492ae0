"""A rank's line to its supervisor, from the rank's side: its job, its notes to other ranks, signs of life, last reason. No torch.

The process ends when the line does. One thread reads, one says twice a second that there is life; both go on in the middle of a step.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

import msgspec

from windlass.core.frames import read_frame
from windlass.core.launch import RankJob
from windlass.engine.protocol import EngineFailed, LoadProgress, describe_error
from windlass.engine.ranks.messages import (
    HEARTBEAT_INTERVAL_SECONDS,
    FromRank,
    HeartbeatRequest,
    KeyFound,
    KeyMissing,
    PutKey,
    RankBuilt,
    RankHeartbeat,
    TakeKey,
    decode_to_rank,
    framed,
)
from windlass.machine.parent_death import exit_on_close
from windlass.parallel.rendezvous import GroupLost

SECONDS_FOR_THE_ANSWER = 5.0
"""More than what was asked for, for the way there and back."""


class SupervisorConnection:
    def __init__(self, connection: socket.socket, *, ends_process: bool = True) -> None:
        """`ends_process`: as a rank's own process should; a guest's goes on without its line."""
        self._connection, self._ends_process = connection, ends_process
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, SimpleQueue[KeyFound | KeyMissing]] = {}
        self._heartbeat: Callable[[], RankHeartbeat] = RankHeartbeat
        if ends_process:
            exit_on_close(connection.fileno())

    def job(self) -> RankJob:
        """The first frame; to be read before `watch`."""
        data = read_frame(self._connection)
        if data is None:
            os._exit(0)
        return msgspec.msgpack.decode(data, type=RankJob)

    def watch(self, heartbeat: Callable[[], RankHeartbeat] = RankHeartbeat) -> None:
        """From now on answers are read and signs of life are given. `heartbeat` is called in another thread."""
        self._heartbeat = heartbeat
        for target in (self._read, self._live):
            threading.Thread(target=target, daemon=True).start()

    def counts(self, heartbeat: Callable[[], RankHeartbeat]) -> None:
        """What there is to tell is known only after a while."""
        self._heartbeat = heartbeat

    # --- a Board: what ranks of an epoch leave for each other, wherever they are

    def put(self, key: str, value: bytes) -> None:
        self._say(PutKey(key, value))

    def take(self, key: str, timeout_seconds: float) -> bytes:
        number, answer = next(self._numbers), SimpleQueue[KeyFound | KeyMissing]()
        self._waiting[number] = answer
        try:
            self._say(TakeKey(number, key, timeout_seconds))
            found = answer.get(timeout=timeout_seconds + SECONDS_FOR_THE_ANSWER)
        except Empty:
            raise GroupLost(f"nobody answered for {key} within {timeout_seconds:g} s") from None
        finally:
            del self._waiting[number]
        if isinstance(found, KeyMissing):
            raise GroupLost(found.reason)
        return found.value

    # --- what the supervisor is told

    def loading(self, done_bytes: int, total_bytes: int) -> None:
        self._say(LoadProgress(done_bytes, total_bytes))

    def built(self, weights_bytes: int) -> None:
        self._say(RankBuilt(weights_bytes))

    def failed(self, error: BaseException) -> None:
        """The last reason. A group that is lost has a kind of its own: whoever hears it looks for the blame elsewhere."""
        told = EngineFailed(**describe_error(error))
        self._say(msgspec.structs.replace(told, kind=GroupLost.__name__) if isinstance(error, GroupLost) else told)

    def _say(self, message: FromRank) -> None:
        with self._sending:
            self._connection.sendall(framed(message))

    def _read(self) -> None:
        """Until the line ends, and with it the process."""
        with suppress(OSError):
            self._heard()
        if self._ends_process:
            os._exit(0)
        for answer in list(self._waiting.values()):
            answer.put(KeyMissing(0, "the epoch is over"))

    def _heard(self) -> None:
        while (data := read_frame(self._connection)) is not None:
            told = decode_to_rank(data)
            if isinstance(told, HeartbeatRequest):
                self._say(msgspec.structs.replace(self._heartbeat(), is_reply=True))
            elif (answer := self._waiting.get(told.id)) is not None:
                answer.put(told)

    def _live(self) -> None:
        """Until nobody listens."""
        pause = threading.Event()
        with suppress(OSError):
            while True:
                self._say(self._heartbeat())
                pause.wait(HEARTBEAT_INTERVAL_SECONDS)
