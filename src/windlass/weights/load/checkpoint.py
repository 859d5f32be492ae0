"""A decoder's tensors out of a checkpoint of whatever format (core.ports.Weights): this rank's slices, straight into place.

Memory: the tensors that are given out, and one slice of what is being read (stream.SLICE_BYTES, with its decoding at most 32 MiB).
Files are read with plain reads, so nothing stays mapped. Of a matrix that is cut along its inputs whole rows are read and this
rank's part is kept; everything else is read by the slices that are held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from windlass.core.place import Interval, Placement
from windlass.errors import UnknownName
from windlass.kernels.cuda.layout import Tiles
from windlass.kernels.packing.panels import Panels
from windlass.kernels.triton.available import has_packed_kernels
from windlass.kernels.triton.tiles.rows import Rows
from windlass.weights.load.dense import load_dense, load_vector
from windlass.weights.load.prefetch import give_back_memory
from windlass.weights.load.quantized import load_packed, panels_bytes
from windlass.weights.load.tiled import are_paired, can_tile, load_tiles
from windlass.weights.source import Opened
from windlass.weights.tensors.readers import Ours
from windlass.weights.tensors.shards import Part, Share, part_at
from windlass.weights.tensors.storage_format import Codes, common_codes, common_dense, form_of
from windlass.weights.tensors.tensor_index import Named
from windlass.weights.tensors.validate import missing, placed

Progress = Callable[[int, int], None]
"""Called with the bytes of the checkpoint that are done, and with all of them."""

Matrix = Tensor | Panels | Rows | Tiles
Loaded = TypeVar("Loaded", bound=Matrix)

EMBED, HEAD = "embed.weight", "head.weight"


class CheckpointWeights:
    """`layers` (a stage) only bounds what `progress` counts; a decoder asks for the tensors of its own layers."""

    def __init__(
        self,
        opened: Opened,
        *,
        placement: Placement | None = None,
        tp_index: int = 0,
        ep_index: int | None = None,
        layers: Interval | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        keep_quantized: bool = True,
        tiled: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """`tiled`: for the kernels of kernels/cuda, where all of the layers' matrices are stored such that they take them."""
        self.spec, self.device = opened.spec, torch.device(device)
        self.dtype = dtype or (torch.float32 if self.device.type == "cpu" else torch.bfloat16)
        self._store, self._places = opened.store, opened.places or placed(opened.rules, opened.store)
        self._named = Named(opened.rules)
        self._share = Share(placement=placement, tp_index=tp_index, ep_index=ep_index)
        self._keep_quantized = keep_quantized
        self._layers = layers or (0, opened.spec.num_layers)
        self.tiled = tiled and keep_quantized and self._can_be_tiled()
        self._progress, self._done, self._total = progress, 0, 0
        self._counted: set[str] = set()
        self._embedding: Matrix | None = None
        give_back_memory()  # of a model that was here before
        if progress is not None:
            self._total = self.total_bytes()
            progress(0, self._total)

    # --- core.ports.Weights

    def matrix(self, *names: str) -> Matrix:
        if self.spec.tied_head and names in ((EMBED,), (HEAD,)):
            if self._embedding is None:
                self._embedding = self._matrix([EMBED])
            return self._embedding
        return self._matrix(names)

    def dense_matrix(self, *names: str) -> Tensor:
        parts = [self._part(name) for name in names]
        return self._given(parts, self._dense([parts])[0])

    def vector(self, *names: str) -> Tensor | None:
        found = [self._named.find(name) for name in names]
        if not any(found):
            return None
        parts = [self._find(ours) for ours in found if ours is not None]
        if len(parts) < len(names):
            missing = next(name for name, ours in zip(names, found, strict=True) if ours is None)
            raise UnknownName("tensor", missing, [ours.name for ours in found if ours is not None])
        return self._given(parts, load_vector(self._store, parts, self._vector_dtype(), self.device))

    def experts(self, layer: int, *parts: str) -> Matrix:
        found = self._expert_parts(layer, parts, "weight")
        every = [part for one in found for part in one]
        codes = self._codes(every)
        if codes is None:
            return self._given(every, self._dense(found))
        return self._given(every, self._packed(found, codes, parts, len(found)))

    def expert_vectors(self, layer: int, *parts: str) -> Tensor | None:
        if self._named.expert_rule(layer, parts[0], "bias") is None:
            return None
        found = self._expert_parts(layer, parts, "bias")
        rows = [load_vector(self._store, one, self._vector_dtype(), self.device) for one in found]
        return self._given([part for one in found for part in one], torch.stack(rows))

    # --- what is there, before anything is read

    def total_bytes(self) -> int:
        """Of the checkpoint, as far as this rank takes it."""
        return sum(self._bytes(part) for part in self._held())

    def memory_bytes(self) -> int:
        """What the tensors will take: exact but for matrices of unlike forms that are stacked, and so become plain."""
        return sum(self._memory_bytes(part) for part in self._held())

    def storage(self) -> dict[str, int]:
        """Bytes of the checkpoint by how they are stored: `{"Q4_K": ..., "Q6_K": ..., "F32": ...}`."""
        found: dict[str, int] = {}
        for part in self._held():
            name = form_of(self._store, part).name
            found[name] = found.get(name, 0) + self._bytes(part)
        return found

    def _held(self) -> Iterator[Part]:
        experts = self._share.experts(self.spec.experts.num_experts) if self.spec.experts else None
        return (self._find(ours) for ours in self._named.held(self.spec, self._layers, experts))

    def _bytes(self, part: Part) -> int:
        return int(part.num_rows * part.num_in * form_of(self._store, part).bits / 8)

    def _memory_bytes(self, part: Part) -> int:
        if len(part.ours.shape) == 1:
            return part.num_rows * self._vector_dtype().itemsize
        codes = self._codes([part])
        if codes is None:
            return part.num_rows * part.num_in * self._dense_dtype([part]).itemsize
        return panels_bytes(codes, part.num_rows, part.num_in)

    # --- how

    def _matrix(self, names: Sequence[str]) -> Matrix:
        parts = [self._part(name) for name in names]
        codes = self._codes(parts)
        if codes is None:
            return self._given(parts, self._dense([parts])[0])
        return self._given(parts, self._packed([parts], codes, names, 0))

    def _packed(self, rows_of: list[list[Part]], codes: Codes, names: Sequence[str], num_experts: int) -> Panels | Rows | Tiles:
        if self.tiled:
            return load_tiles(self._store, rows_of, codes, paired=are_paired(names), device=self.device)
        return load_packed(self._store, rows_of, codes, num_experts, self.device)

    def _codes(self, parts: list[Part]) -> Codes | None:
        """None: everything is plain, because it is stored so, or asked for, or the device has no kernels for anything else."""
        if not self._keep_quantized or not (self.tiled or has_packed_kernels(self.device)):
            return None
        if self.tiled and not all(_is_tiled(part) for part in parts):
            return None
        return common_codes(parts, {form_of(self._store, part) for part in parts})

    def _can_be_tiled(self) -> bool:
        return all(
            can_tile(form_of(self._store, part).codes, part.num_rows, part.num_in) for part in self._held() if _is_tiled(part)
        )

    def _dense(self, rows_of: list[list[Part]]) -> Tensor:
        dtype = self._dense_dtype([part for one in rows_of for part in one])
        return load_dense(self._store, rows_of, dtype, self.device)

    def _dense_dtype(self, parts: list[Part]) -> torch.dtype:
        if not self._keep_quantized:
            return torch.float32
        if self.device.type != "cpu":
            return self.dtype
        return common_dense({form_of(self._store, part) for part in parts})

    def _vector_dtype(self) -> torch.dtype:
        return torch.float32

    def _part(self, name: str) -> Part:
        return self._find(self._named.get(name))

    def _find(self, ours: Ours) -> Part:
        place = self._places.get(ours.name)
        if place is None:
            raise missing(ours)
        return part_at(ours, place, self._share)

    def _expert_parts(self, layer: int, parts: Sequence[str], kind: str) -> list[list[Part]]:
        rules = [self._named.expert_rule(layer, part, kind) for part in parts]
        if any(rule is None for rule in rules):
            raise UnknownName("expert tensor", f"layers.{layer} {' '.join(parts)} {kind}", ["gate", "up", "down"])
        held = [rule for rule in rules if rule is not None]
        numbers = range(*self._share.experts(held[0].num_experts))
        return [[self._find(Ours(rule=rule, layer=layer, expert=number)) for rule in held] for number in numbers]

    def _given(self, parts: list[Part], loaded: Loaded) -> Loaded:
        """Counted, the first time."""
        if self._progress is not None:
            for part in parts:
                if part.ours.name not in self._counted:
                    self._counted.add(part.ours.name)
                    self._done += self._bytes(part)
            self._progress(self._done, self._total)
        return loaded


def _is_tiled(part: Part) -> bool:
    """Where anything is: every matrix of the layers but the routers. For the head, too, those kernels have plain numbers."""
    return part.ours.layer is not None and len(part.ours.shape) == 2 and not part.ours.name.endswith(".router.weight")
