"""The device mesh of a training run: pp x copies x ep x tp, and its process groups.

pp is outermost and tp innermost, so that ranks that communicate most are neighbours. Data-parallel ranks are copies x ep: experts are
sharded over ep of them, and FSDP shards everything else over all of them, over the copies only, or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from windlass.core.layout import training_groups
from windlass.core.recipe.sections import ParallelSection
from windlass.errors import Impossible


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
    """The recipe's degrees, with dp and fsdp derived. Refuses degrees that do not divide or are not supported."""
    tp, pp, ep = parallel.tp or 1, parallel.pp or 1, parallel.ep or 1
    _refuse_unknown(parallel)
    dp = training_groups(world, tp=tp, pp=pp).dp
    if dp % ep:
        raise Impossible(
            f"parallel.ep {ep} must divide the number of data-parallel ranks: {world} processes with tp {tp} and pp {pp}"
            f" have {dp}"
        )
    fsdp = parallel.fsdp or (1 if parallel.zero == 0 else dp)
    if fsdp not in {1, dp // ep, dp}:
        raise Impossible(
            f"parallel.fsdp {fsdp} is not possible: with {dp} data-parallel ranks and ep {ep} it may be"
            f" {', '.join(map(str, sorted({1, dp // ep, dp})))}"
        )
    return Degrees(pp=pp, copies=dp // ep, ep=ep, tp=tp, fsdp=fsdp)


def _refuse_unknown(parallel: ParallelSection) -> None:
    """What can be planned for other trainers, but is not implemented here."""
    if (parallel.cp or 1) > 1:
        raise Impossible(f"parallel.cp {parallel.cp}: context parallelism can be planned but not trained; remove it")
    if (parallel.virtual_stages or 1) > 1:
        raise Impossible("parallel.virtual_stages: interleaved schedules can be planned but not trained; remove it")
    if parallel.schedule != "1f1b":
        raise Impossible(f'parallel.schedule = "{parallel.schedule}" can be planned but not trained; use "1f1b"')
    if parallel.zero in (1, 2):
        raise Impossible(
            f'parallel.zero {parallel.zero}: FSDP is ZeRO 3, or 0 for none; stages 1 and 2 need run.engine = "deepspeed"'
        )


class Meshes:
    def __init__(self, device_type: str, of: Degrees) -> None:
        """Created by all ranks together."""
        self.of = of
        self.grid = init_device_mesh(device_type, (of.pp, of.copies, of.ep, of.tp), mesh_dim_names=("pp", "copies", "ep", "tp"))
        self.data = self.grid["copies", "ep"]._flatten("data")
        self.pp_rank, self.copy_rank, self.ep_rank, self.tp_rank = self.grid.get_coordinate() or (0, 0, 0, 0)
        self.dp_rank = self.copy_rank * of.ep + self.ep_rank
        self._device_type = device_type
        self.dense_mesh = self._dense_mesh()
        self.expert_mesh = self._expert_mesh()

    def group(self, axis: str) -> Any:
        return self.data.get_group() if axis == "data" else self.grid[axis].get_group()

    def _dense_mesh(self) -> DeviceMesh | None:
        """FSDP mesh of everything but experts. None: replicated."""
        of = self.of
        if of.fsdp == 1:
            return None
        if of.fsdp == of.dp:
            return self.data
        # FSDP's hybrid sharding needs the replicated axis first, so this mesh has another axis order.
        ranks = torch.arange(dist.get_world_size()).view(of.pp, of.copies, of.ep, of.tp).permute(0, 3, 2, 1).contiguous()
        turned = DeviceMesh(self._device_type, ranks, mesh_dim_names=("pp", "tp", "replicate", "shard"))
        return turned["replicate", "shard"]

    def _expert_mesh(self) -> DeviceMesh | None:
        """FSDP mesh of experts: ranks with the same experts."""
        if self.of.fsdp == 1:
            return None
        return self.dense_mesh if self.of.ep == 1 else self.grid["copies"]
