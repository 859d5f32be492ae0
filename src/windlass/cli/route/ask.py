"""`windlass route ask`: where a prompt would go and why; with a router.toml, also its answer."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.request import Request
from windlass.errors import BadInput, UnknownName


def ask_command(file: Path, prompt: str, variant: str, as_json: bool) -> int:
    from windlass.tasks.route.operate.client import VARIANTS

    if not prompt.strip():
        raise BadInput("the prompt is empty")
    if file.suffix == ".toml":
        return asyncio.run(_answer(file, prompt, variant, as_json))
    if variant not in VARIANTS:
        raise UnknownName("variant", variant, VARIANTS)
    found = explain(file, prompt, variant)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    else:
        _show(found)
    return 0


def explain(file: Path, prompt: str, variant: str) -> dict[str, Any]:
    """From the router alone: all models are taken to be there."""
    from windlass.tasks.route.decide.policy import Candidate, Policy, Situation, decide, tolerance_for
    from windlass.tasks.route.decide.predict import PromptPredictor
    from windlass.tasks.route.decide.router_file import read_router

    router = read_router(file)
    found = PromptPredictor(router).predict(prompt)
    policy = Policy(kind={"auto": "floor", "auto:cheap": "cheap", "auto:best": "best"}[variant])  # type: ignore[arg-type]
    candidates = tuple(
        Candidate(name=model.name, chance=chance, cost=model.cost, seconds=model.seconds or 0.0)
        for model, chance in zip(router.models, found.chances, strict=True)
    )
    tolerance = tolerance_for(policy, router.tolerance, router.path, None)
    situation = Situation(candidates=candidates, best=router.best, tolerance=tolerance, policy=policy, is_unlike=found.is_unlike)
    decision = decide(situation)
    return {
        "model": decision.model,
        "reason": decision.reason,
        "models": [{"name": one.name, "chance": min(max(one.chance, 0.0), 1.0), "cost": one.cost} for one in candidates],
        "tolerance": tolerance,
        "novelty": found.novelty,
        "max_novelty": router.max_novelty,
        "is_unlike": found.is_unlike,
        "then": decision.then,
    }


def _show(found: dict[str, Any]) -> None:
    from windlass.cli.console import console
    from windlass.cli.eval.tables import table

    rows = [(one["name"], f"{one['chance']:.2f}", f"{one['cost']:.4g}") for one in found["models"]]
    console().print(table(f"{found['model']}: {found['reason']}", ("model", "#chance of being right", "#cost"), rows))


async def _answer(file: Path, prompt: str, variant: str, as_json: bool) -> int:
    from windlass.open.route import open_router

    router = open_router(file)
    notes: dict[str, str] = {}
    try:
        request = Request(messages=({"role": "user", "content": prompt},), model=variant)
        text = list[str]()
        async for delta in router.generate(request):
            notes |= delta.notes
            text.append(delta.content)
            if not as_json:
                sys.stdout.write(delta.content)
                sys.stdout.flush()
    finally:
        await router.close()
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode({"answer": "".join(text), **notes}), indent=2).decode() + "\n")
    else:
        sys.stdout.write("\n")
        sys.stderr.write(f"{notes.get('windlass-route-model')}: {notes.get('windlass-route-reason')}\n")
    return 0
