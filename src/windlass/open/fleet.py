"""Opens a fleet: a model over several ranks, on this machine or on workers, and how it is planned anew when machines come and go."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from windlass.core.constants import BLOCK_TOKENS
from windlass.core.launch import Launch
from windlass.core.layout import Layout
from windlass.core.ranks.epoch import EpochPlan, Node

if TYPE_CHECKING:
    from windlass.runtime.fleet.root.epoch import MakeEngine, NodeProgress
    from windlass.runtime.fleet.root.root import Fleet
    from windlass.tasks.plan.inference.epoch import EpochRequest

SEQUENCES, SEQUENCE_TOKENS, SINGLE_SEQUENCE_TOKENS = 16, 2048, 8192
"""KV memory planned for by default: many short conversations, or one longer one."""


def open_fleet(
    launch: Launch,
    nodes: Callable[[NodeProgress], None],
    notify: Callable[[str], None],
    make_engine: MakeEngine | None = None,
) -> Fleet:
    from windlass.runtime.fleet.protocol.secret import read_secret, warning
    from windlass.runtime.fleet.root.root import Fleet, process_engine

    secret = b""
    if launch.secret_file is not None:
        file = Path(launch.secret_file).expanduser()
        secret = read_secret(file)
        if problem := warning(file):
            sys.stderr.write(f"windlass: {problem}\n")
    launch = msgspec.structs.replace(launch, device=_device(launch.device))
    check_split(launch)
    if crowded := _crowded(launch):
        notify(crowded)
    planner = Replanner(launch)
    if launch.workers and launch.kv_bytes is None:
        launch = msgspec.structs.replace(launch, kv_bytes=planner.kv_bytes)
    replan = planner.replan if launch.workers else planner.on_this_machine
    return Fleet(launch, replan, secret, notify=notify, progress=nodes, make_engine=make_engine or process_engine)


def check_split(launch: Launch) -> None:
    """Raises Impossible for a layout that the model cannot be split by: before any process starts, and without torch.

    Groups of quantized matrices are not cut. They are at least as large as counted here, so whatever passes may still be refused by the
    ranks (weights.schemes.cutting_scheme), and nothing is refused that they could do.
    """
    from windlass.core.place import place
    from windlass.core.scheme import GROUPS, scheme
    from windlass.model.families import describe, rules

    if launch.random_weights is not None:
        config, quantized = launch.random_weights.config, scheme(launch.random_weights.scheme, launch.random_weights.group)
    elif Path(launch.model).exists():
        from windlass.open.stored import stored_files

        files = stored_files(Path(launch.model))
        config, quantized = files.config, files.scheme
    else:
        return
    spec = describe(config, Path(launch.model).name)
    has_groups = quantized is not None and quantized.bits < 16
    group = quantized.group if quantized is not None and quantized.group in GROUPS else min(GROUPS)
    place(rules(spec), spec.num_layers, launch.layout, scheme("int4", group) if has_groups else scheme("bf16"))


def _device(asked: str) -> str:
    """Every machine of a fleet uses the same kind of device; `auto` is this machine's."""
    if asked == "cpu":
        return asked
    from windlass.runtime.machine.gpus import this_machines_gpus

    gpus = this_machines_gpus()  # raises if GPUs cannot be counted; their number decides the transport
    return asked if asked != "auto" else "cuda" if gpus else "cpu"


def _crowded(launch: Launch) -> str:
    from windlass.runtime.machine.system import this_system

    return "" if launch.device != "cpu" else crowded_note(launch.layout, launch.ranks_per_machine, this_system().num_cores)


def crowded_note(layout: Layout, ranks: int, cores: int) -> str:
    """Where more ranks share this machine than it has cores: it works, to try a layout, and it is slow."""
    if ranks <= cores:
        return ""
    have = f"{cores} core{'s' if cores > 1 else ''}"
    return (
        f"{layout} starts {ranks} processes on this machine, which has {have}: they take turns, and the answer comes later than from one "
        f"process; up to {cores} rank{'s' if cores > 1 else ''} can be of use here"
    )


class Replanner:
    """Plans each epoch; what the planner must know of the model is read once."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def on_this_machine(self, nodes: Sequence[Node]) -> EpochPlan:
        """As the options or the saved plan say."""
        layout = self._launch.layout
        return self._launch.planned or EpochPlan(layout=layout, nodes=(0,) * layout.world)

    def replan(self, nodes: Sequence[Node]) -> EpochPlan:
        from windlass.tasks.plan.inference.epoch import replan

        planned = self._launch.planned
        return planned if planned is not None and len(nodes) == len(set(planned.nodes)) else replan(self._question, nodes)

    @property
    def kv_bytes(self) -> int:
        """The KV cache that is planned for, which every machine then has room for."""
        from windlass.core.scheme import kv_token_bytes

        question = self._question
        per_token = kv_token_bytes(question.spec, self._launch.kv_type)
        return per_token * question.concurrency * (-(-question.context_tokens // BLOCK_TOKENS) * BLOCK_TOKENS)

    @cached_property
    def _question(self) -> EpochRequest:
        from windlass.core.scheme import scheme
        from windlass.model.families import describe, rules
        from windlass.tasks.plan.inference.epoch import EpochRequest

        launch, random = self._launch, self._launch.random_weights
        if random is not None:
            spec = describe(random.config, launch.model)
            table, how = rules(spec), scheme(random.scheme, random.group, launch.kv_type)
        else:
            from windlass.runtime.weights.schemes import sizing_scheme
            from windlass.runtime.weights.source import open_model

            opened = open_model(Path(launch.model))
            try:
                spec, table, how = opened.spec, opened.rules, scheme("fp32") if launch.exact else sizing_scheme(opened)
            finally:
                opened.store.close()
        sequences = launch.max_sequences or SEQUENCES
        usual = SINGLE_SEQUENCE_TOKENS if sequences == 1 else SEQUENCE_TOKENS
        return EpochRequest(
            spec=spec,
            rules=table,
            scheme=msgspec.structs.replace(how, kv=launch.kv_type),
            context_tokens=launch.context_tokens or min(spec.context_tokens, usual),
            concurrency=sequences,
            pinned=launch.layout if launch.layout.world > 1 else None,
        )
