"""One rank of a split model, a process of its own, as a test of real groups starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from talking import Way, joined

from windlass.core.layout import Layout
from windlass.core.place import place
from windlass.core.scheme import Scheme


def run_rank(
    rank: int,
    folder: str,
    model: str,
    layout: Layout,
    how: Scheme,
    way: Way,
    dtype: torch.dtype,
    steps: list[dict[str, torch.Tensor]],
) -> None:
    """Leaves what it says in FOLDER/RANK.safetensors. In fp32 it is a program that is replayed."""
    from safetensors.torch import save_file
    from split_models import called, replayed

    from windlass.runtime.kernels.step import Step
    from windlass.runtime.nn import Decoder, ModelShard
    from windlass.runtime.weights import CheckpointWeights, open_model

    groups = joined(rank, f"{folder}/board", layout, way)
    opened = open_model(Path(model))
    placement = place(opened.rules, opened.spec.num_layers, layout, how)
    weights = CheckpointWeights(opened, placement=placement, tp_index=groups.tp.rank, dtype=dtype)
    decoder = Decoder(opened.spec, weights, shard=ModelShard(placement, layout, groups))
    run = replayed if dtype == torch.float32 else called
    said = run(decoder, [(Step(**step), 4) for step in steps])
    if dtype == torch.float32 and way.transport == "links":
        check_no_stops(decoder, Step(**steps[0]))
    save_file({str(number): logits for number, logits in enumerate(said)}, f"{folder}/{rank}.safetensors")
    for group in (groups.tp, groups.pp):
        group.all_reduce(torch.ones(1))  # nobody leaves while another still waits for it


def check_no_stops(decoder: Any, step: Any) -> None:
    """What ranks say are operations like all others: a replay stops only at its end, to see whether all were there."""
    from windlass.runtime.kernels.program import program

    caches = decoder.make_caches(4, torch.float32)
    with program.record(step.counts[0:1]) as recorded:
        decoder(step, caches)
    groups = decoder.shard.groups
    assert recorded.num_calls == sum(group.size > 1 for group in (groups.tp, groups.pp))
    sums = 2 * len(decoder.layers) if groups.tp.size > 1 else 0
    assert recorded.names.count("link_sum") == sums
