"""An engine in a process of its own: `python -m windlass.runtime.engine.process FD`, FD being one end of a pair of Unix sockets.

The RankJob comes on standard input, so that `ps` does not show it, and after the imports: a process that was started ahead of its job has them
behind it. Without a job it ends. The process exits when the other end of the socket closes, in the
middle of a step too: there is no state to save.
"""

from __future__ import annotations

import contextlib
import gc
import select
import signal
import socket
import sys
from importlib import import_module

import msgspec

from windlass.core.launch import RankJob
from windlass.errors import Error
from windlass.runtime.engine.progress import ThrottledProgress
from windlass.runtime.engine.protocol import (
    Command,
    EngineFailed,
    EngineReady,
    LoadProgress,
    MessageReader,
    Report,
    describe_error,
    encode_frame,
)
from windlass.runtime.engine.timeline import mark
from windlass.runtime.machine.parent_death import exit_on_close, kill_with_parent
from windlass.runtime.machine.torch_import import beside_libraries, importing, load_ahead

SECONDS_BETWEEN_PROGRESS = 0.05
RECEIVE_BYTES = 2**18
LOADING_THRESHOLD = 50_000
"""Objects between garbage collections while a model is loaded: nearly all that is made then stays. 700 cost a tenth of listing 53,000 tensors."""


def main() -> int:
    mark("engine process up")
    kill_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client, which cancels or closes
    connection = socket.socket(fileno=int(sys.argv[1]))
    exit_on_close(connection.fileno())
    try:
        load_ahead(mark)
        with importing():
            for module in beside_libraries():
                with contextlib.suppress(ImportError):
                    import_module(module)
            mark("imports beside libraries done")
            import_module("torch")
            mark("torch imported")
            for module in ("windlass.runtime.engine.loop", "windlass.runtime.engine.load"):  # what nearly every job needs
                import_module(module)
        mark("imports done")
        data = sys.stdin.buffer.read()
        if not data:
            return 0
        _serve(msgspec.msgpack.decode(data, type=RankJob), connection)
    except (BrokenPipeError, ConnectionResetError):  # the client is gone
        return 0
    except Error as error:
        connection.sendall(encode_frame(EngineFailed(**describe_error(error))))
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the outermost edge: report it and exit
        import traceback

        traceback.print_exc()
        connection.sendall(encode_frame(EngineFailed(**describe_error(error))))
        return 1
    return 0


def _serve(job: RankJob, connection: socket.socket) -> None:
    module, _, function = job.launch.loader.partition(":")
    with importing():
        from windlass.runtime.engine.loop import EngineLoop

        load = getattr(import_module(module), function)
    mark("job received")

    def send(report: Report) -> None:
        connection.sendall(encode_frame(report))

    thresholds = gc.get_threshold()
    gc.set_threshold(LOADING_THRESHOLD, *thresholds[1:])
    engine, info = load(job, ThrottledProgress(lambda done, total: send(LoadProgress(done, total)), SECONDS_BETWEEN_PROGRESS))
    gc.collect()
    gc.freeze()  # what is loaded stays: collections need not scan it again
    gc.set_threshold(*thresholds)
    send(EngineReady(info))
    mark("engine ready")
    EngineLoop(engine, info, send).run(_Inbox(connection).take)


class _Inbox:
    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._reader = connection, MessageReader()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def take(self, wait: bool) -> list[Command] | None:
        commands: list[Command] = []
        while (wait and not commands) or self._poll.poll(0):
            data = self._connection.recv(RECEIVE_BYTES)
            if not data:
                return None
            commands += self._reader.commands(data)
        return commands


if __name__ == "__main__":
    sys.exit(main())
