"""One rank of a split model, a process of its own, as a test of real groups starts it."""

from __future__ import annotations

from pathlib import Path

import torch

from windlass.core.layout import Layout
from windlass.core.place import place
from windlass.core.scheme import Scheme


def run_rank(rank: int, folder: str, model: str, layout: Layout, how: Scheme, steps: list[dict[str, torch.Tensor]]) -> None:
    """Leaves what it says in FOLDER/RANK.safetensors."""
    from safetensors.torch import save_file
    from split_models import replayed
    from torch.distributed import FileStore

    from windlass.kernels import program
    from windlass.kernels.step import Step
    from windlass.nn import Decoder, Shard
    from windlass.parallel.processes import join_processes
    from windlass.weights import CheckpointWeights, open_model

    torch.set_num_threads(1)
    program.set_threads(1)
    opened = open_model(Path(model))
    placement = place(opened.rules, opened.spec.num_layers, layout, how)
    groups = join_processes(layout, rank, FileStore(f"{folder}/store", layout.world))
    weights = CheckpointWeights(opened, placement=placement, tp_index=groups.tp.rank)
    decoder = Decoder(opened.spec, weights, shard=Shard(placement, layout, groups))
    said = replayed(decoder, [(Step(**step), 4) for step in steps])
    save_file({str(number): logits for number, logits in enumerate(said)}, f"{folder}/{rank}.safetensors")
    groups.tp.all_reduce(torch.ones(1))  # nobody leaves while another still waits for it
