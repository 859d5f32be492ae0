"""One rank of three that write an answer together, first with exact sums, then with small ones."""

from __future__ import annotations

from typing import Any

import torch
from talking import Way, joined

from windlass.core.layout import Layout

BLOCKS = 8


def write_answers(rank: int, folder: str, model: str, prompt: list[int], ways: dict[str, Way], count: int) -> None:
    """Rank 0 leaves the tokens of each way, and the logits of the exact answer under both."""
    from safetensors.torch import save_file

    found: dict[str, torch.Tensor] = {}
    for name, way in ways.items():
        decoder, group = made(rank, f"{folder}/{name}", model, way, len(prompt) + count)
        tokens, logits = answer(decoder, group, prompt, count, found.get("exact"))
        found[name] = found.get("exact", tokens)
        found[f"{name} logits"], found[f"{name} tokens"] = logits, tokens
        group.all_reduce(torch.ones(1))
    if rank == 0:
        save_file({name: value.contiguous() for name, value in found.items() if " " in name}, f"{folder}/answers.safetensors")


def made(rank: int, folder: str, model: str, way: Way, context: int) -> tuple[Any, Any]:
    from pathlib import Path

    from windlass.core.place import place
    from windlass.runtime.nn import Decoder, ModelShard
    from windlass.runtime.weights import CheckpointWeights, open_model
    from windlass.runtime.weights.schemes import cutting_scheme

    layout = Layout(tp=len(way.machines))
    groups = joined(rank, folder, layout, way)
    opened = open_model(Path(model))
    placement = place(opened.rules, opened.spec.num_layers, layout, cutting_scheme(opened))
    weights = CheckpointWeights(opened, placement=placement, tp_index=rank)
    return Decoder(opened.spec, weights, context, shard=ModelShard(placement, layout, groups)), groups.tp


def answer(decoder: Any, group: Any, prompt: list[int], count: int, forced: torch.Tensor | None) -> tuple[Any, Any]:
    """Greedy tokens, and the logits at each of them; where `forced` is given, the logits of that answer instead of its own."""
    tokens, own = _run(decoder, group, prompt, count, None)
    if forced is None:
        return tokens, own
    return tokens, _run(decoder, group, prompt, count, forced)[1]


def _run(decoder: Any, group: Any, prompt: list[int], count: int, forced: torch.Tensor | None) -> tuple[Any, Any]:
    caches = decoder.make_caches(BLOCKS, torch.float32)
    chosen, logits, start, given = [], [], 0, list(prompt)
    with torch.inference_mode():
        for at in range(count):
            said = decoder(_step(given, start), caches)
            token = said.argmax(-1).to(torch.int32) if group.rank == 0 else torch.zeros(1, dtype=torch.int32)
            group.broadcast(token)
            logits.append(said)
            chosen.append(int(token))
            start, given = start + len(given), [chosen[-1] if forced is None else int(forced[at])]
    return torch.tensor(chosen, dtype=torch.int32), torch.cat(logits)


def _step(tokens: list[int], start: int) -> Any:
    from windlass.runtime.kernels.step import Step

    stop = start + len(tokens)
    place = torch.arange(start, stop, dtype=torch.int32)
    return Step(
        tokens=torch.tensor(tokens, dtype=torch.int32),
        positions=place,
        slots=place,
        starts=torch.tensor([0, len(tokens)], dtype=torch.int32),
        lengths=torch.tensor([stop], dtype=torch.int32),
        blocks=torch.arange(BLOCKS, dtype=torch.int32)[None],
        logit_rows=torch.tensor([len(tokens) - 1], dtype=torch.int32),
        counts=torch.tensor([len(tokens), 1, 1], dtype=torch.int32),
    )
