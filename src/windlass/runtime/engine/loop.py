"""The engine's main loop: commands in, steps, reports out."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from windlass.core.request import Info
from windlass.errors import Error
from windlass.runtime.engine.adapters import AdapterChanges
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.footprint import device_memory
from windlass.runtime.engine.protocol import (
    AddAdapter,
    Cancel,
    Command,
    InfoReply,
    InfoRequest,
    RemoveAdapter,
    Report,
    RequestRejected,
    SequenceOutput,
    StepOutputs,
    Submit,
    TokenizerData,
    describe_error,
)
from windlass.runtime.engine.tiers import tier_stats
from windlass.runtime.machine.memory import process_memory

Take = Callable[[bool], "list[Command] | None"]
"""`take(wait)` -> commands that have arrived, at least one if `wait`; None: there will be no more."""
Send = Callable[[Report], None]


class EngineLoop:
    def __init__(self, engine: Engine, info: Info, send: Send) -> None:
        self._engine, self._info, self._send = engine, info, send
        self._adapters = AdapterChanges(engine)
        self._embeddings: dict[int, Submit] = {}
        """That wait: one is computed between two steps, so that answers go on."""

    def run(self, take: Take) -> None:
        """Until there are no more commands. Blocks for commands only while there is nothing to compute."""
        engine = self._engine
        while (commands := take(not engine.has_work and not self._embeddings and not self._adapters)) is not None:
            for command in commands:
                self._handle(command)
            if self._adapters:
                for report in self._adapters.finished():
                    self._send(report)
            self._embed_one()
            if engine.has_work:
                outputs = engine.step()
                if outputs:
                    self._send(StepOutputs(outputs))

    def _embed_one(self) -> None:
        if not self._embeddings:
            return
        submit = self._embeddings.pop(next(iter(self._embeddings)))
        try:
            self._send(StepOutputs([self._engine.embed(submit)]))
        except Error as error:
            self._send(RequestRejected(submit.id, **describe_error(error)))

    def _handle(self, command: Command) -> None:
        match command:
            case Submit() if command.pooling:
                self._embeddings[command.id] = command
            case Submit():
                try:
                    self._engine.submit(command)
                except Error as error:
                    self._send(RequestRejected(command.id, **describe_error(error)))
                else:
                    if not command.grammar:  # which may still turn out to be invalid
                        self._send(StepOutputs([SequenceOutput(command.id, [])]))
            case TokenizerData():
                self._engine.set_tokenizer(command)
            case Cancel() if command.id in self._embeddings:
                del self._embeddings[command.id]
            case Cancel():
                output = self._engine.cancel(command.id)
                if output is not None:
                    self._send(StepOutputs([output]))
            case AddAdapter():
                self._adapters.add(command)
            case RemoveAdapter():
                self._adapters.remove(command)
            case InfoRequest():
                self._send(InfoReply(command.id, self._current_info()))

    def _current_info(self) -> Info:
        stats = msgspec.structs.replace(
            self._engine.stats(),
            process_bytes=process_memory().resident_bytes,
            devices=device_memory(),
            tiers=tier_stats(self._engine.runner.decoder),
        )
        return msgspec.structs.replace(self._info, stats=stats)
