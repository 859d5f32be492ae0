"""One model over several processes of this machine: this rank's part of it, and the engine of the first, which alone schedules and samples."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial

from torch.distributed import FileStore

from windlass.core.model import ModelSpec
from windlass.core.place import place
from windlass.core.request import Info
from windlass.core.rule import Rule
from windlass.core.scheme import Scheme
from windlass.engine.engine import Engine
from windlass.engine.load import Built, Progress, build, chosen_device, make_engine, make_info
from windlass.engine.protocol import Launch
from windlass.engine.own_ranks import Ranks, announce
from windlass.errors import Impossible
from windlass.nn.shard import Shard
from windlass.parallel.groups import Groups
from windlass.parallel.processes import join_processes


def load_split(launch: Launch, progress: Progress | None = None) -> tuple[Engine, Info]:
    """The first rank, in this process, and the others, in their own; they end with the decoder."""
    began = time.perf_counter()
    _check(launch)
    ranks = Ranks(launch)
    try:
        built = build_rank(launch, 0, ranks.store, progress)
        announce(built.decoder, ranks)
        engine = make_engine(launch, built.decoder, "cpu")
        ranks.begin(engine.limits)
    except BaseException:
        ranks.close()
        raise
    weakref.finalize(built.decoder, ranks.close)
    return engine, make_info(launch, engine, built, "cpu", time.perf_counter() - began)


def build_rank(launch: Launch, rank: int, store: str, progress: Progress | None = None) -> Built:
    """Groups meet first: a rank that is missing is noticed before anything is read."""
    groups = join_processes(launch.layout, rank, FileStore(store, launch.layout.world))
    return build(launch, "cpu", progress, partial(_shard, launch, groups))


def _shard(launch: Launch, groups: Groups, spec: ModelSpec, rules: tuple[Rule, ...], stored: Callable[[], Scheme]) -> Shard:
    return Shard(place(rules, spec.num_layers, launch.layout, stored()), launch.layout, groups)


def _check(launch: Launch) -> None:
    layout = launch.layout
    if layout.dp > 1:
        raise Impossible(f"dp {layout.dp}: copies of a model are servers of their own; choose tp and pp")
    if chosen_device(launch.device) != "cpu":
        raise Impossible(f"{layout} on {launch.device}: a model is split over processes on CPUs only so far; add --device cpu")
