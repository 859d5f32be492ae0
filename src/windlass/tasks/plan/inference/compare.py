"""How other engines would do with the same model, layout and load: the line that says which is best for the goal. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from windlass.core.plan import Reason
from windlass.errors import Impossible
from windlass.tasks.plan.engines.load import NAMES, engine, loads_scheme
from windlass.tasks.plan.engines.profile import EngineProfile
from windlass.tasks.plan.engines.tried import not_run_yet
from windlass.tasks.plan.inference.candidates import Candidate, evaluate
from windlass.tasks.plan.inference.feasible import check_layout
from windlass.tasks.plan.inference.search.best import SearchResult
from windlass.tasks.plan.inference.search.choices import runs_on
from windlass.tasks.plan.inference.search.request import PlanRequest

MOST_SHOWN = 4
CLOSE = 0.05
"""Predictions nearer than this are called equal."""


def engine_rows(request: PlanRequest, answer: SearchResult) -> list[Reason]:
    """With `--engine auto`: those that could do the same today, by their predicted rate over the chosen one's."""
    if request.engine != "auto" or not answer.best.fits:
        return []
    mine = goal_rate(request, answer.best)
    others = sorted(((goal_rate(request, one) / mine, one.engine) for one in _others(request, answer)), key=lambda pair: -pair[0])
    if not others:
        return []
    shown = ", ".join(f"{profile.name} {ratio:.2g}x" for ratio, profile in others[:MOST_SHOWN])
    best, profile = others[0]
    verdict = f"{profile.title} is predicted fastest" if best > 1 + CLOSE else f"{answer.best.engine.title} is best or equal"
    why = f"for {request.goal}, {verdict}; the same model, scheme and layout, plan one with --engine NAME"
    return [Reason(choice="other engines", value=shown, why=why)]


def goal_rate(request: PlanRequest, found: Candidate) -> float:
    return found.speed.decode_tokens_per_second if request.goal == "latency" else found.speed.sustained_tokens_per_second


def _others(request: PlanRequest, answer: SearchResult) -> Iterator[Candidate]:
    best, site = answer.best, answer.site
    here = replace(request, hardware=site.hardware)
    spills = bool(best.fit.host_bytes or best.fit.disk_bytes)
    for name in NAMES:
        profile = engine(name)
        if profile is best.engine or not runs_on(profile, here) or not _able(profile, best, spills):
            continue
        try:
            check_layout(profile, request.spec, request.rules, best.scheme, best.layout)
        except Impossible:
            continue
        found = evaluate(best.times.model.sizes, site, profile, best.scheme, best.layout, best.workload, spill=spills)
        if found.fits:
            yield found


def _able(profile: EngineProfile, best: Candidate, spills: bool) -> bool:
    if not loads_scheme(profile, best.scheme.name) or best.scheme.kv not in profile.caches or spills > profile.offload:
        return False
    if profile.only_offload and not spills:
        return False
    if profile.name != "windlass":
        return True
    devices = [slot.device for slot in best.fit.slots]
    return not not_run_yet(
        devices,
        best.layout.world,
        offloads=spills,
        to_disk=bool(best.fit.disk_bytes),
        has_kernels=best.times.kernel_pass.has(best.fit.slots[0]),
    )
