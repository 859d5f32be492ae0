"""A rank's piece of one of our tensors, as DCP saves and fills it: where it lies in the whole, whatever the layout that made it so.

DTensor knows even cuts over a mesh. Ours follow heads, and several of ours lie in one parameter, so a piece says its own place; DCP
takes anything that does (torch.distributed._checkpointable).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from windlass.train.slabs import Part


class Piece:
    def __init__(self, part: Part, tensor: Tensor) -> None:
        self.part, self.tensor = part, tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.shape

    def size(self) -> torch.Size:
        """Of the whole, by which DCP tells another model's."""
        return torch.Size(self.part.shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> Piece:
        """In host memory, where it stays as it is while training goes on."""
        return Piece(self.part, self.tensor.detach().to("cpu", copy=True).contiguous())

    # --- torch.distributed._checkpointable

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
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
        offsets = torch.Size(start for start, _ in self.part.held)
        return [ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(self.part.sizes))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.tensor


def whole_or_piece(part: Part, tensor: Tensor) -> Tensor | Piece:
    """A plain tensor where all of it is here. Both are saved alike, and fill each other."""
    return tensor if part.is_whole else Piece(part, tensor)
