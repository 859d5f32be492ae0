"""A rank's connection to its supervisor: its job, the rendezvous store, heartbeats, and its last error. No torch.

The process exits when the socket closes. One thread reads, one sends heartbeats twice a second; both run in the middle of a step too.
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

from windlass.core.launch import RankJob
from windlass.core.ranks.frames import read_frame
from windlass.runtime.engine.protocol import EngineFailed, LoadProgress, describe_error
from windlass.runtime.engine.ranks.messages import (
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
from windlass.runtime.machine.parent_death import exit_on_close
from windlass.runtime.parallel.group import GroupLost

ROUND_TRIP_SECONDS = 5.0
"""Added to the timeout of a key, for the round trip."""


class SupervisorConnection:
    def __init__(self, connection: socket.socket, *, ends_process: bool = True) -> None:
        """`ends_process`: exit when the socket closes. Not for an inline rank, whose process runs on."""
        self._connection, self._ends_process = connection, ends_process
        self._sending = threading.Lock()
        self._ids = itertools.count()
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
        """Starts reading replies and sending heartbeats. `heartbeat` is called in another thread."""
        self._heartbeat = heartbeat
        for target in (self._read, self._send_heartbeats):
            threading.Thread(target=target, daemon=True).start()

    def report_with(self, heartbeat: Callable[[], RankHeartbeat]) -> None:
        """Replaces `heartbeat`, once there are counters to report."""
        self._heartbeat = heartbeat

    # --- the rendezvous store of the epoch

    def put(self, key: str, value: bytes) -> None:
        self._send(PutKey(key, value))

    def take(self, key: str, timeout_seconds: float) -> bytes:
        number, answer = next(self._ids), SimpleQueue[KeyFound | KeyMissing]()
        self._waiting[number] = answer
        try:
            self._send(TakeKey(number, key, timeout_seconds))
            found = answer.get(timeout=timeout_seconds + ROUND_TRIP_SECONDS)
        except Empty:
            raise GroupLost(f"no reply for the key {key!r} within {timeout_seconds:g} s") from None
        finally:
            del self._waiting[number]
        if isinstance(found, KeyMissing):
            raise GroupLost(found.reason)
        return found.value

    # --- reports

    def loading(self, done_bytes: int, total_bytes: int) -> None:
        self._send(LoadProgress(done_bytes, total_bytes))

    def built(self, weights_bytes: int) -> None:
        self._send(RankBuilt(weights_bytes))

    def failed(self, error: BaseException) -> None:
        """The last message. A lost group has a kind of its own: another rank is to blame then."""
        failed = EngineFailed(**describe_error(error))
        self._send(msgspec.structs.replace(failed, kind=GroupLost.__name__) if isinstance(error, GroupLost) else failed)

    def _send(self, message: FromRank) -> None:
        with self._sending:
            self._connection.sendall(framed(message))

    def _read(self) -> None:
        """Until the socket closes, and with it the process."""
        with suppress(OSError):
            self._read_messages()
        if self._ends_process:
            os._exit(0)
        for answer in list(self._waiting.values()):
            answer.put(KeyMissing(0, "the epoch is over"))

    def _read_messages(self) -> None:
        while (data := read_frame(self._connection)) is not None:
            message = decode_to_rank(data)
            if isinstance(message, HeartbeatRequest):
                self._send(msgspec.structs.replace(self._heartbeat(), is_reply=True))
            elif (answer := self._waiting.get(message.id)) is not None:
                answer.put(message)

    def _send_heartbeats(self) -> None:
        """Until the socket closes."""
        pause = threading.Event()
        with suppress(OSError):
            while True:
                self._send(self._heartbeat())
                pause.wait(HEARTBEAT_INTERVAL_SECONDS)
