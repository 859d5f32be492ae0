"""The device mesh of a training run: pp x copies x ep x tp, and its process groups.

pp is outermost and tp innermost, so that ranks that communicate most are neighbours. Data-parallel ranks are copies x ep: experts are
sharded over ep of them, and FSDP shards everything else over all of them, over the copies only, or not at all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from windlass.tasks.train.parallel.degrees import Degrees


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
