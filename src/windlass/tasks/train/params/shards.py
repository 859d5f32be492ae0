"""A rank's shard of one of our tensors for torch.distributed.checkpoint (DCP), with its offsets in the whole tensor.

DTensor supports even splits over a mesh. Ours follow heads, and one parameter holds several tensors, so a shard carries its own
offsets (torch.distributed._checkpointable).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from windlass.tasks.train.params.layout import TensorSlice


class TensorShard(Tensor):
    """A Tensor subclass, because DCP accepts only tensors. Shares its storage with `tensor`."""

    part: TensorSlice
    owned: TensorSlice
    """The part that this rank saves, if several ranks hold the same rows: the end of `part`, or all of it."""
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type[TensorShard], part: TensorSlice, tensor: Tensor, owned: TensorSlice | None = None) -> TensorShard:
        made = Tensor._make_subclass(cls, tensor.detach())
        made.part, made.owned = part, owned or part
        return made

    @property
    def tensor(self) -> Tensor:
        return self.as_subclass(Tensor)

    def size(self, dim: int | None = None) -> Any:
        """Size of the whole tensor, which DCP compares. `shape` is that of the shard."""
        whole = torch.Size(self.part.shape)
        return whole if dim is None else whole[dim]

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorShard:
        """A copy in host memory, unaffected by further training."""
        return TensorShard(self.part, self.tensor.to("cpu", copy=True).contiguous(), self.owned)

    # --- torch.distributed._checkpointable

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        if not prod(self.owned.sizes):
            return []
        chunk = _chunk(self.owned)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(self.tensor), size=torch.Size(self.part.shape)
                ),
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(self.part)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The whole shard for loading, or the saved part of it."""
        first, start = self.part.held[0][0], (index.offset or [self.part.held[0][0]])[0]
        return self.tensor[start - first :]


def _chunk(part: TensorSlice) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(start for start, _ in part.held), sizes=torch.Size(part.sizes))


def tensor_or_shard(part: TensorSlice, tensor: Tensor, owned: TensorSlice) -> Tensor | TensorShard:
    """A plain tensor if this rank holds and saves all of it. DCP loads either kind into the other."""
    return tensor if part.is_whole and owned == part else TensorShard(part, tensor, owned)
