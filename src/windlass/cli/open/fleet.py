"""`--workers`, `--tp` and what goes with them: from the command line's words to a client over several machines, or processes of this one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from windlass.core.layout import Layout
from windlass.core.model import Frozen
from windlass.core.ranks.epoch import EpochPlan, Node
from windlass.core.ranks.rendezvous import EXACT, SYNCS
from windlass.errors import BadInput

if TYPE_CHECKING:
    from windlass.engine.client.calls import Progress
    from windlass.engine.client.client import EngineClient
    from windlass.engine.protocol import Launch
    from windlass.fleet.root.epoch import MakeEngine, NodeProgress
    from windlass.fleet.root.root import Fleet
    from windlass.plan.inference.epoch import Asked

SEQUENCES, SEQUENCE_TOKENS, ALONE_TOKENS = 16, 2048, 8192
"""What memory is planned for where nothing was asked: many short conversations, or one that is longer."""

Told = Callable[[str], None]


class Over(Frozen):
    """What a model runs over."""

    workers: str | None = None
    """HOST:PORT, several with commas."""
    secret_file: Path | None = None
    sync: str = EXACT
    layout: Layout = Layout()
    planned: EpochPlan | None = None
    """What a saved plan says of several ranks, for as long as there are as many machines as it is for."""

    @property
    def is_one(self) -> bool:
        """A process of this machine, and no more."""
        return self.workers is None and self.layout.world == 1

    def check(self) -> None:
        """What is wrong is said before anything is loaded."""
        layout = self.layout
        if layout.ep > layout.tp or layout.tp % layout.ep:
            raise BadInput(
                f"--ep {layout.ep} must divide --tp {layout.tp}: experts are spread over the processes that share a layer"
            )
        if self.sync not in SYNCS:
            raise BadInput(f"--sync is {' or '.join(SYNCS)}, not {self.sync!r}")
        if self.workers is None:
            if self.secret_file is not None:
                raise BadInput("--secret-file is for --workers; name them, or leave it out")
            if self.sync != EXACT and self.is_one:
                raise BadInput(f"--sync {self.sync} is for several processes or machines; add --workers or --tp")
            return
        if self.secret_file is None:
            raise BadInput("--workers needs --secret-file FILE, the one that the workers were started with")
        machines, ranks = len(self.names) + 1, layout.world
        if ranks > machines and ranks % machines:
            raise BadInput(
                f"{ranks} ranks ({layout}) are not to be shared out evenly over {machines} machines, this one included; "
                f"choose as many as there are machines, or a multiple"
            )

    @property
    def names(self) -> tuple[str, ...]:
        from windlass.fleet.root.member import addresses

        return () if self.workers is None else addresses(self.workers)

    @property
    def ranks_per_machine(self) -> int:
        return max(self.layout.world // (len(self.names) + 1), 1)


def open_client(
    launch: Launch,
    over: Over,
    progress: Progress | None = None,
    nodes: Callable[[NodeProgress], None] = lambda _: None,
    told: Told = lambda _: None,
) -> EngineClient:
    """In a process of its own; over several there are besides, or over several machines. It loads when it is asked."""
    from windlass.engine.client.client import open_client as open_alone
    from windlass.engine.client.client import with_text

    if over.is_one:
        return open_alone(launch, progress)
    from windlass.fleet.root.client import FleetClient

    launch, text = with_text(launch)
    return FleetClient(open_fleet(launch, over, nodes, told), text, progress)


def open_fleet(
    launch: Launch, over: Over, nodes: Callable[[NodeProgress], None], told: Told, make_engine: MakeEngine | None = None
) -> Fleet:
    from windlass.fleet.protocol.secret import read_secret, warning
    from windlass.fleet.root.root import Fleet, process_engine

    secret = b""
    if over.secret_file is not None:
        secret = read_secret(over.secret_file)
        if words := warning(over.secret_file):
            sys.stderr.write(f"windlass: {words}\n")
    launch = msgspec.structs.replace(launch, device=_device(launch.device))
    asked = Replanned(launch, over)
    if over.workers is not None and launch.kv_bytes is None:
        launch = msgspec.structs.replace(launch, kv_bytes=asked.kv_bytes)
    return Fleet(
        launch,
        asked.replan if over.workers is not None else asked.here,
        over.names,
        secret,
        sync=over.sync,
        num_ranks=over.ranks_per_machine,
        told=told,
        progress=nodes,
        make_engine=make_engine or process_engine,
    )


def _device(asked: str) -> str:
    """Every machine of a fleet computes on the same kind of device; `auto` is this one's."""
    if asked == "cpu":
        return asked
    from windlass.machine.gpus import this_machines_gpus

    gpus = this_machines_gpus()  # how many there are decides how ranks talk; says what is missing where they cannot be counted
    return asked if asked != "auto" else "cuda" if gpus else "cpu"


class Replanned:
    """How the machines there are share this model: what the planner must know of it is looked for once."""

    def __init__(self, launch: Launch, over: Over) -> None:
        self._launch, self._over = launch, over

    def here(self, nodes: Sequence[Node]) -> EpochPlan:
        """This machine only: as it was asked for."""
        return self._over.planned or EpochPlan(layout=self._over.layout, nodes=(0,) * self._over.layout.world)

    def replan(self, nodes: Sequence[Node]) -> EpochPlan:
        from windlass.plan.inference.epoch import replan

        planned = self._over.planned
        return planned if planned is not None and len(nodes) == len(set(planned.nodes)) else replan(self._asked, nodes)

    @property
    def kv_bytes(self) -> int:
        """What was planned for, and what every machine then has room for."""
        from windlass.core.model import kv_bytes_per_token
        from windlass.core.scheme import KV_BYTES

        asked = self._asked
        per_token = kv_bytes_per_token(asked.spec, KV_BYTES[self._launch.kv])
        return per_token * asked.concurrency * (-(-asked.context_tokens // BLOCK_TOKENS) * BLOCK_TOKENS)

    @cached_property
    def _asked(self) -> Asked:
        from windlass.core.scheme import scheme
        from windlass.families import describe, rules
        from windlass.plan.inference.epoch import Asked

        launch, random = self._launch, self._launch.random_weights
        if random is not None:
            spec = describe(random.config, launch.model)
            table, how = rules(spec), scheme(random.scheme, random.group, launch.kv)
        else:
            from windlass.weights.schemes import sizing_scheme
            from windlass.weights.source import open_model

            opened = open_model(Path(launch.model))
            try:
                spec, table, how = opened.spec, opened.rules, scheme("fp32") if launch.exact else sizing_scheme(opened)
            finally:
                opened.store.close()
        sequences = launch.max_sequences or SEQUENCES
        usual = ALONE_TOKENS if sequences == 1 else SEQUENCE_TOKENS
        return Asked(
            spec=spec,
            rules=table,
            scheme=msgspec.structs.replace(how, kv=launch.kv),
            context_tokens=launch.context_tokens or min(spec.context_tokens, usual),
            concurrency=sequences,
            wanted=self._over.layout if self._over.layout.world > 1 else None,
        )


BLOCK_TOKENS = 16
"""As in kernels.step, which imports torch."""
