"""LoRA adapters of an engine: read when it starts, and put into it or taken out of it while it runs.

Files are read in a thread, so that steps go on; matrices enter the decoder between two steps. An adapter leaves when no request has it
any more. Steps without adapters are not changed by either: they have a program, or graphs, of their own (runtime/nn/adapters.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import cast

from windlass.core.launch import Launch
from windlass.errors import BadInput, Impossible
from windlass.model.families import rules
from windlass.runtime.engine.admission import SECONDS_TO_WAIT
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.protocol import AdapterChanged, AddAdapter, RemoveAdapter, Report, RequestRejected, describe_error
from windlass.runtime.nn.adapters import Adapters, Matrices
from windlass.runtime.nn.decoder import Decoder
from windlass.runtime.weights.adapters import matrix_rows, read_adapter

NamedMatrices = Mapping[str, Matrices]


def add_adapters(launch: Launch, engine: Engine) -> None:
    """Those that the engine starts with."""
    for name, folder in launch.adapters:
        _attach(engine, name, _read(engine, folder))


class AdapterChanges:
    """Adapters that come and go while the engine runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._adding: list[tuple[AddAdapter, Future[NamedMatrices]]] = []
        self._removing: list[RemoveAdapter] = []
        self._threads: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._adding) + len(self._removing)

    def add(self, command: AddAdapter) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "adapters")
        self._adding.append((command, self._threads.submit(_read, self._engine, command.folder)))

    def remove(self, command: RemoveAdapter) -> None:
        self._removing.append(command)

    def finished(self) -> list[Report]:
        """Between two steps: enters what has been read, and drops what nobody uses. Waits a moment if there is nothing to compute."""
        wait([read for _, read in self._adding], 0 if self._engine.has_work else SECONDS_TO_WAIT, FIRST_COMPLETED)
        added = [pair for pair in self._adding if pair[1].done()]
        removed = [command for command in self._removing if not self._engine.uses_adapter(command.name)]
        self._adding = [pair for pair in self._adding if pair not in added]
        self._removing = [command for command in self._removing if command not in removed]
        return [self._added(*pair) for pair in added] + [self._removed(command) for command in removed]

    def _added(self, command: AddAdapter, read: Future[NamedMatrices]) -> Report:
        try:
            _attach(self._engine, command.name, read.result())
        except Exception as error:  # noqa: BLE001 - out of memory and the like: the engine goes on without it
            return RequestRejected(command.id, **describe_error(error))
        return AdapterChanged(command.id)

    def _removed(self, command: RemoveAdapter) -> Report:
        adapters = self._engine.runner.adapters
        if adapters is not None:
            adapters.remove(command.name)
        return AdapterChanged(command.id)


def _read(engine: Engine, folder: str) -> NamedMatrices:
    decoder = cast(Decoder, engine.runner.decoder)
    if decoder.fused is not None:
        raise Impossible("the weights are in the layout of the Hopper kernels, which takes no adapters")
    found = read_adapter(Path(folder), rules(decoder.spec))
    return {key: (pair.a, pair.b) for key, pair in found.items()}


def _attach(engine: Engine, name: str, matrices: NamedMatrices) -> None:
    runner, decoder = engine.runner, cast(Decoder, engine.runner.decoder)
    if runner.adapters is not None and name in runner.adapters:
        raise BadInput(f"adapter {name} is loaded already")
    adapters = runner.adapters or Adapters(matrix_rows(rules(decoder.spec)), runner.device)
    adapters.add(name, matrices, decoder)
    runner.set_adapters(adapters)
