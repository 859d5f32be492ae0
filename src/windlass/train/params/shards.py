"""A rank's piece of one of our tensors, as DCP saves and fills it: where it lies in the whole, whatever the layout that made it so.

DTensor knows even cuts over a mesh. Ours follow heads, and several of ours lie in one parameter, so a piece says its own place; DCP
takes anything that does (torch.distributed._checkpointable).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from windlass.train.params.layout import Part


class Piece(Tensor):
    """A tensor, because DCP drops whatever is none; its numbers are `tensor`'s own, wherever that lies."""

    part: Part
    owned: Part
    """What of it this rank saves: rows that several hold are one's to save. The end of what is held, or all of it."""
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, part: Part, tensor: Tensor, owned: Part | None = None) -> Piece:
        made = Tensor._make_subclass(cls, tensor.detach())
        made.part, made.owned = part, owned or part
        return made

    @property
    def tensor(self) -> Tensor:
        return self.as_subclass(Tensor)

    def size(self, dim: int | None = None) -> Any:
        """Of the whole, by which DCP tells another model's. `shape` is the piece's own."""
        whole = torch.Size(self.part.shape)
        return whole if dim is None else whole[dim]

    def __deepcopy__(self, memo: dict[int, Any]) -> Piece:
        """In host memory, where it stays as it is while training goes on."""
        return Piece(self.part, self.tensor.to("cpu", copy=True).contiguous(), self.owned)

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
        """All of it to be filled, or what is saved: the two begin elsewhere, or are the same."""
        first, start = self.part.held[0][0], (index.offset or [self.part.held[0][0]])[0]
        return self.tensor[start - first :]


def _chunk(part: Part) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(start for start, _ in part.held), sizes=torch.Size(part.sizes))


def whole_or_piece(part: Part, tensor: Tensor, owned: Part) -> Tensor | Piece:
    """A plain tensor where all of it is here, and saved here. Both are saved alike, and fill each other."""
    return tensor if part.is_whole and owned == part else Piece(part, tensor, owned)
