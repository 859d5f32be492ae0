"""How the processes of a run are arranged: which layouts the trainers have, and what to change in one that they have not. No torch.

The changes are searched for with the same rules that refuse, so that a refusal's advice is accepted when it is followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import msgspec

from windlass.core.model import Frozen
from windlass.core.recipe.recipe import Recipe
from windlass.core.recipe.sections import EngineName, ParallelSection
from windlass.errors import Impossible

MOST_CHANGES = 3
MOST_DEGREE, MOST_PROCESSES = 8, 64
"""The largest degree, and number of processes of a machine, that is proposed."""


@dataclass(frozen=True)
class Degrees:
    pp: int
    copies: int
    ep: int
    tp: int
    fsdp: int

    @property
    def dp(self) -> int:
        return self.copies * self.ep


def degrees(parallel: ParallelSection, world: int) -> Degrees:
    """The recipe's degrees, with dp and fsdp derived: FSDP over all data-parallel ranks, but with pipeline stages over none."""
    if (why := _why_not_torch(parallel, world)) is not None:
        raise Impossible(why)
    tp, pp, ep = parallel.tp or 1, parallel.pp or 1, parallel.ep or 1
    dp = world // (tp * pp)
    replicated = parallel.zero == 0 or (parallel.zero is None and pp > 1)
    return Degrees(pp=pp, copies=dp // ep, ep=ep, tp=tp, fsdp=parallel.fsdp or (1 if replicated else dp))


class Arrangement(Frozen):
    """What a run starts with."""

    parallel: ParallelSection
    engine: EngineName = "torch"
    nproc: int = 1
    """Processes of each machine."""
    num_nodes: int = 1

    @property
    def world(self) -> int:
        return self.nproc * self.num_nodes


def check_arrangement(recipe: Recipe, nproc: int, num_nodes: int = 1, most: int | None = None) -> None:
    """Refuses what no trainer has, and says what to change. `most`: processes that a machine can run; None: any number."""
    wanted = Arrangement(parallel=recipe.parallel, engine=recipe.run.engine, nproc=nproc, num_nodes=num_nodes)
    if (why := why_not(wanted)) is not None:
        raise Impossible(f"{why}: {_advice(wanted, most or MOST_PROCESSES)}")


def why_not(wanted: Arrangement) -> str | None:
    """The reason in one line, or None."""
    parallel, world = wanted.parallel, wanted.world
    if wanted.engine == "deepspeed":
        return _why_not_deepspeed(parallel)
    if (why := _why_not_torch(parallel, world)) is not None:
        return why
    pp = parallel.pp or 1
    if parallel.zero == 3 and pp > 1 and world // (pp * (parallel.tp or 1)) > 1:
        return f"parallel.zero 3 (FSDP) with pp {pp} would gather every stage's weights for every micro-batch"
    return None


def _why_not_deepspeed(parallel: ParallelSection) -> str | None:
    for name in ("tp", "pp", "cp", "ep", "expert_tp"):
        if (degree := getattr(parallel, name) or 1) > 1:
            return f"DeepSpeed is used for data parallelism only, without parallel.{name} {degree}"
    if parallel.fsdp is not None:
        return f"parallel.fsdp {parallel.fsdp} is PyTorch's; what DeepSpeed shards is parallel.zero"
    return "parallel.zero 0 does not need DeepSpeed" if parallel.zero == 0 else None


def _why_not_torch(parallel: ParallelSection, world: int) -> str | None:
    tp, pp, ep = parallel.tp or 1, parallel.pp or 1, parallel.ep or 1
    if (why := _unknown(parallel)) is not None:
        return why
    if world % (tp * pp):
        return f"tp {tp} x pp {pp} needs a multiple of {tp * pp} processes, and there {_are(world)}"
    dp = world // (tp * pp)
    if dp % ep:
        return f"parallel.ep {ep} must divide the number of data-parallel ranks: {world} processes with tp {tp} and pp {pp} have {dp}"
    return _why_not_fsdp(parallel, dp, ep)


def _are(number: int) -> str:
    return "is one" if number == 1 else f"are {number}"


def _unknown(parallel: ParallelSection) -> str | None:
    """What can be planned for other trainers, but is not implemented here."""
    if (parallel.cp or 1) > 1:
        return f"parallel.cp {parallel.cp}: context parallelism can be planned but not trained"
    if (parallel.virtual_stages or 1) > 1:
        return f"parallel.virtual_stages {parallel.virtual_stages}: interleaved schedules can be planned but not trained"
    if parallel.schedule != "1f1b":
        return f'parallel.schedule "{parallel.schedule}" can be planned but not trained, only "1f1b"'
    if parallel.zero in (1, 2):
        return (
            f"parallel.zero {parallel.zero}: FSDP is ZeRO 3, or 0 for none; stages 1 and 2 are those of"
            ' run.engine = "deepspeed", which has neither tp, pp nor ep'
        )
    return None


def _why_not_fsdp(parallel: ParallelSection, dp: int, ep: int) -> str | None:
    fsdp, zero = parallel.fsdp, parallel.zero
    if fsdp is None:
        return None
    possible = sorted({1, dp // ep, dp})
    if fsdp not in possible:
        ranks = f"{dp} data-parallel rank{'' if dp == 1 else 's'} and ep {ep}"
        return f"parallel.fsdp {fsdp} is not possible: with {ranks} it may be {', '.join(map(str, possible))}"
    if dp > 1 and zero is not None and (fsdp > 1) != (zero == 3):
        return f"parallel.fsdp {fsdp} contradicts parallel.zero {zero}: FSDP over several ranks is ZeRO 3, over one it is 0"
    return None


# --- what to change


def _advice(wanted: Arrangement, most: int) -> str:
    for keeps_degrees in (True, False):
        for number in range(1, MOST_CHANGES + 1):
            for changes in _changes(wanted, number, most, keeps_degrees):
                if why_not(_changed(wanted, changes)) is None:
                    return _in_words(changes)
    return "there is no such combination"


def _changes(wanted: Arrangement, number: int, most: int, keeps_degrees: bool) -> Iterator[dict[str, Any]]:
    """So many at once. `keeps_degrees`: those that were asked for."""
    sizes = [2**power for power in range(MOST_DEGREE.bit_length())]
    parallel = wanted.parallel
    unit = (parallel.tp or 1) * (parallel.pp or 1) * (parallel.ep or 1)
    counts = [count for count in range(wanted.nproc + 1, min(most, MOST_PROCESSES) + 1) if count * wanted.num_nodes % unit == 0]
    options: dict[str, list[Any]] = {
        "zero": [0, 3] if (parallel.pp or 1) > 1 else [3, 0],
        "nproc": counts,
        "fsdp": [None] if wanted.engine == "deepspeed" else sizes[::-1],
        "engine": ["torch"],
    }
    degrees_asked: dict[str, list[Any]] = {
        "ep": sizes[::-1],
        "pp": [1],
        "tp": [1],
        "cp": [1],
        "virtual_stages": [1],
        "schedule": ["1f1b"],
    }
    options |= {} if keeps_degrees else degrees_asked
    current = {name: getattr(wanted if name in ("nproc", "engine") else parallel, name) for name in options}
    for names in combinations(options, number):
        if any(current[name] is None for name in names if name not in ("nproc", "engine", "zero")):
            continue  # nothing is said of it, so nothing is to be changed
        for values in product(*(options[name] for name in names)):
            if all(value != current[name] for name, value in zip(names, values, strict=True)):
                yield dict(zip(names, values, strict=True))


def _changed(wanted: Arrangement, changes: dict[str, Any]) -> Arrangement:
    own = {name: value for name, value in changes.items() if name in ("nproc", "engine")}
    rest = {name: value for name, value in changes.items() if name not in own}
    return msgspec.structs.replace(wanted, parallel=msgspec.structs.replace(wanted.parallel, **rest), **own)


def _in_words(changes: dict[str, Any]) -> str:
    parts = [_one_in_words(name, value) for name, value in changes.items()]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _one_in_words(name: str, value: Any) -> str:
    if name == "nproc":
        return f"start {value} with --nproc {value}"
    if value is None:
        return f"remove parallel.{name}"
    section = "run" if name == "engine" else "parallel"
    return f"set {section}.{name} = {msgspec.json.encode(value).decode()}"
