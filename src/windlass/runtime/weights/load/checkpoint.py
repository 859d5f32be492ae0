"""Weights from a checkpoint of any format (core.ports.Weights): this rank's shards, loaded in place.

Memory: the tensors returned, plus a slice in flight (prefetch.SLICE_BYTES; at most 32 MiB with decoding), or the buffers of
`begin` (192 MiB). Files are read with pread, never mapped. Of a matrix split along its inputs whole rows are read and this rank's
columns kept; otherwise only this rank's rows are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from windlass.core.place import Interval, Placement
from windlass.core.tiers.demand import HeldTensor
from windlass.errors import UnknownName
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.packing.matrix import StackedMatrix
from windlass.runtime.kernels.packing.packed_rows import PackedRows
from windlass.runtime.kernels.packing.panels import Panels
from windlass.runtime.kernels.program import loader
from windlass.runtime.kernels.triton.available import has_packed_kernels
from windlass.runtime.weights.load.background import BackgroundLoad, has_files
from windlass.runtime.weights.load.dense import load_dense, load_vector
from windlass.runtime.weights.load.prefetch import trim_heap
from windlass.runtime.weights.load.quantized import load_packed, packed_bytes
from windlass.runtime.weights.load.tiled import can_tile, empty_tiles, is_gate_up, load_tiles
from windlass.runtime.weights.source import OpenedModel
from windlass.runtime.weights.tensors.readers import ModelTensor
from windlass.runtime.weights.tensors.shards import RankShare, TensorShard, shard_of
from windlass.runtime.weights.tensors.storage_format import (
    CodeFormat,
    StorageFormat,
    StorageFormats,
    common_code_format,
    common_dtype,
)
from windlass.runtime.weights.tensors.tensor_index import TensorIndex
from windlass.runtime.weights.tensors.validate import locate_tensors, missing_tensor

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, total bytes)."""

Matrix = Tensor | Panels | PackedRows | StackedMatrix | Tiles
Loaded = TypeVar("Loaded", bound=Matrix)

EMBED, HEAD, SHARED = "embed.weight", "head.weight", "layers.{layer}.ffn.shared.{part}.weight"


class _Alike(NamedTuple):
    """Tensors of one rule in one storage format: they take the same bytes, in the file and in memory."""

    first: TensorShard
    form: StorageFormat
    tensors: list[ModelTensor]


class CheckpointWeights:
    """`layers`: this pipeline stage; only used for the total of `progress`."""

    def __init__(
        self,
        opened: OpenedModel,
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
        """`tiled`: use the layout of runtime/kernels/cuda, if every matrix of the layers is stored in a form it supports."""
        self.spec, self.device = opened.spec, torch.device(device)
        self.dtype = dtype or (torch.float32 if self.device.type == "cpu" else torch.bfloat16)
        self._store, self._locations = opened.store, opened.locations or locate_tensors(opened.rules, opened.store)
        self._index, self._forms = TensorIndex(opened.rules), StorageFormats(opened.store)
        self._slices: dict[int, tuple[Interval, ...]] = {}
        self._share = RankShare(placement=placement, tp_index=tp_index, ep_index=ep_index)
        self._keep_quantized = keep_quantized
        self._layers = layers or (0, opened.spec.num_layers)
        self.tiled = tiled and keep_quantized and self._can_be_tiled()
        self._progress, self._done, self._total, self._told = progress, 0, 0, 0
        self._counted: set[str] = set()
        self._embedding: Matrix | None = None
        self._background: BackgroundLoad | None = None
        self._rooms: dict[tuple[str, ...], Tiles] = {}
        """Behind the experts of a layer, for its shared expert."""
        trim_heap()  # return the memory of a previous model
        if progress is not None:
            self._total = self.total_bytes()
            progress(0, self._total)

    # --- weights that are on their way when they are returned

    def begin(self, side: loader.DeviceSide | None = None) -> None:
        """What is large is read by threads of its own from now on, where that is possible: returned at once, and there after `finish`."""
        if self.tiled and has_files(self._store) and (side is not None or (self.device.type == "cuda" and loader.available())):
            self._background = BackgroundLoad(side or loader.CudaSide(self.device), self._tell)

    def finish(self) -> None:
        """Returns when all that was asked for is there; raises what went wrong."""
        if self._background is not None:
            self._background.finish()
            self._tell()

    @property
    def background_state(self) -> loader.LoaderState | None:
        return None if self._background is None else self._background.state

    def close(self) -> None:
        """Ends reading, also before its end. May be called twice."""
        if self._background is not None:
            self._background.close()

    # --- core.ports.Weights

    def matrix(self, *names: str) -> Matrix:
        if self.spec.tied_head and names in ((EMBED,), (HEAD,)):
            if self._embedding is None:
                self._embedding = self._matrix([EMBED])
            return self._embedding
        return self._matrix(names)

    def dense_matrix(self, *names: str) -> Tensor:
        shards = [self._shard(name) for name in names]
        return self._report(shards, self._dense([shards])[0])

    def vector(self, *names: str) -> Tensor | None:
        found = [self._index.find(name) for name in names]
        if not any(found):
            return None
        shards = [self._find(tensor) for tensor in found if tensor is not None]
        if len(shards) < len(names):
            absent = next(name for name, tensor in zip(names, found, strict=True) if tensor is None)
            raise UnknownName("tensor", absent, [tensor.name for tensor in found if tensor is not None])
        return self._report(shards, load_vector(self._store, shards, self._vector_dtype(), self.device))

    def experts(self, layer: int, *parts: str, only: Interval | None = None) -> Matrix:
        """`only`: some of this rank's experts, first..last."""
        found = self._expert_shards(layer, parts, "weight", only)
        every = [shard for one in found for shard in one]
        codes = self._codes(every)
        if codes is None:
            return self._report(every, self._dense(found))
        if self._background is not None and only is None:
            return self._report(every, self._experts_and_room(layer, found, codes, parts))
        return self._report(every, self._packed(found, codes, parts, len(found)))

    def expert_vectors(self, layer: int, *parts: str) -> Tensor | None:
        if self._index.expert_rule(layer, parts[0], "bias") is None:
            return None
        found = self._expert_shards(layer, parts, "bias")
        rows = [load_vector(self._store, one, self._vector_dtype(), self.device) for one in found]
        return self._report([shard for one in found for shard in one], torch.stack(rows))

    # --- for weights that live elsewhere (offload)

    def num_experts(self) -> int:
        """Of each layer, on this rank."""
        first, last = self._share.experts(self.spec.experts.num_experts) if self.spec.experts else (0, 0)
        return last - first

    def skip(self, *names: str) -> None:
        """Counts tensors as loaded that are not needed; `layers.3.experts` are all experts of a layer."""
        for name in names if self._progress is not None else ():
            if name.endswith(".experts"):
                layer = int(name.split(".")[1])
                shards = [shard for one in self._expert_shards(layer, ("gate", "up", "down"), "weight") for shard in one]
            else:
                shards = [self._shard(name)]
            self._report(shards, torch.empty(0))

    def skip_experts(self, layer: int, count: int) -> None:
        """The same for the first experts of a layer."""
        if self._progress is not None:
            shards = self._expert_shards(layer, ("gate", "up", "down"), "weight", (0, count))
            self._report([shard for one in shards for shard in one], torch.empty(0))

    def held_tensors(self) -> Iterator[HeldTensor]:
        """What this rank holds, with the bytes in memory."""
        for alike in self._held:
            num_bytes = self._memory_bytes(alike.first)
            for tensor in alike.tensors:
                name = tensor.name
                lookup = name == "positions.weight" or (name == EMBED and not self.spec.tied_head)
                yield HeldTensor(name, num_bytes, is_lookup=lookup)

    # --- sizes, before anything is read

    def total_bytes(self) -> int:
        """Checkpoint bytes that this rank reads."""
        return sum(len(alike.tensors) * self._bytes(alike.first) for alike in self._held)

    def memory_bytes(self) -> int:
        """Memory of the loaded tensors. Exact, except for experts whose gate and up are in different formats, which are loaded dense."""
        return self._memory_of(self._held)

    def mtp_bytes(self) -> int:
        """The same of the MTP layer."""
        return self._memory_of(self._alike(self._index.next_token()))

    def storage(self) -> dict[str, int]:
        """Checkpoint bytes by storage format: `{"Q4_K": ..., "Q6_K": ..., "F32": ...}`."""
        found: dict[str, int] = {}
        for alike in self._held:
            found[alike.form.name] = found.get(alike.form.name, 0) + len(alike.tensors) * self._bytes(alike.first)
        return found

    @cached_property
    def _held(self) -> list[_Alike]:
        return self._alike_of(self._layers)

    def _alike_of(self, layers: Interval) -> list[_Alike]:
        experts = self._share.experts(self.spec.experts.num_experts) if self.spec.experts else None
        return self._alike(self._index.held(self.spec, layers, experts))

    def _alike(self, tensors: Iterable[ModelTensor]) -> list[_Alike]:
        found: list[_Alike] = []
        for tensor in tensors:
            shard = self._find(tensor)
            form = self._form(shard)
            if not found or found[-1].form is not form or found[-1].first.tensor.rule is not tensor.rule:
                found.append(_Alike(shard, form, []))
            found[-1].tensors.append(tensor)
        return found

    def _memory_of(self, held: list[_Alike]) -> int:
        return sum(len(alike.tensors) * self._memory_bytes(alike.first) for alike in held)

    def _form(self, shard: TensorShard) -> StorageFormat:
        return self._forms.of(shard.tensor, shard.location)

    def _bytes(self, shard: TensorShard) -> int:
        return int(shard.num_rows * shard.num_in * self._form(shard).bits / 8)

    def _memory_bytes(self, shard: TensorShard) -> int:
        if len(shard.tensor.shape) == 1:
            return shard.num_rows * self._vector_dtype().itemsize
        codes = self._codes([shard])
        if codes is None:
            return shard.num_rows * shard.num_in * self._dense_dtype([shard]).itemsize
        return packed_bytes(codes, shard.num_rows, shard.num_in, self.device)

    # --- loading

    def _matrix(self, names: Sequence[str]) -> Matrix:
        shards = [self._shard(name) for name in names]
        codes = self._codes(shards)
        if codes is not None:
            return self._report(shards, self._packed([shards], codes, names, 0))
        runs = [] if self.tiled else self._runs_alike(shards)
        if any(self._codes(run) is not None for run in runs):
            return self._report(shards, StackedMatrix(tuple(self._part(run) for run in runs)))
        return self._report(shards, self._plain(shards[0]) if tuple(names) in ((EMBED,), (HEAD,)) else self._dense([shards])[0])

    def _plain(self, shard: TensorShard) -> Tensor:
        """A matrix that nothing reads while the decoder is built."""
        if self._background is not None:
            out = torch.empty(shard.num_rows, shard.num_in, dtype=self._dense_dtype([shard]), device=self.device)
            if self._background.put_plain(self._store, shard, out):
                return out
        return self._dense([[shard]])[0]

    def _runs_alike(self, shards: list[TensorShard]) -> list[list[TensorShard]]:
        """Neighbours that are held in one form; a part each of a stacked matrix."""
        return [list(run) for _, run in groupby(shards, lambda shard: self._codes([shard]))]

    def _part(self, run: list[TensorShard]) -> Tensor | Panels | PackedRows:
        codes = self._codes(run)
        return self._dense([run])[0] if codes is None else load_packed(self._store, [run], codes, 0, self.device)

    def _packed(
        self, rows_of: list[list[TensorShard]], codes: CodeFormat, names: Sequence[str], num_experts: int
    ) -> Panels | PackedRows | Tiles:
        if self.tiled:
            room = self._rooms.pop(tuple(names), None)
            made = room or empty_tiles(rows_of[0], codes, len(rows_of), paired=is_gate_up(names), device=self.device)
            is_copied = room is None and ".ffn.shared." in names[0]
            return load_tiles(self._store, rows_of, codes, made, None if is_copied else self._background)
        return load_packed(self._store, rows_of, codes, num_experts, self.device)

    def _experts_and_room(self, layer: int, found: list[list[TensorShard]], codes: CodeFormat, parts: Sequence[str]) -> Tiles:
        """The fused pass wants the shared expert behind the others: it is loaded there, not copied later, when it may not have arrived."""
        names = tuple(SHARED.format(layer=layer, part=part) for part in parts)
        shared = [self._find(tensor) for name in names if (tensor := self._index.find(name)) is not None]
        alike = [(shard.num_rows, shard.num_in) for shard in shared] == [(shard.num_rows, shard.num_in) for shard in found[0]]
        has_room = alike and self._codes(shared) == codes
        made = empty_tiles(found[0], codes, len(found) + has_room, paired=is_gate_up(parts), device=self.device)
        if has_room:
            self._rooms[names] = made.part(len(found), len(found) + 1)
        is_copied = bool(shared) and not has_room
        return load_tiles(self._store, found, codes, made.part(0, len(found)), None if is_copied else self._background)

    def _codes(self, shards: list[TensorShard]) -> CodeFormat | None:
        """None: load as plain numbers, because stored so, requested, or the device has no kernels for quantized weights."""
        if not self._keep_quantized or not (self.tiled or has_packed_kernels(self.device)):
            return None
        if self.tiled and not all(_is_tiled(shard) for shard in shards):
            return None
        return common_code_format(shards, {self._form(shard) for shard in shards})

    def _can_be_tiled(self) -> bool:
        """All layers of the model: those of other stages too."""
        every = self._held if self._layers == (0, self.spec.num_layers) else self._alike_of((0, self.spec.num_layers))
        return all(
            can_tile(alike.form.codes, alike.first.num_rows, alike.first.num_in) for alike in every if _is_tiled(alike.first)
        )

    def _dense(self, rows_of: list[list[TensorShard]]) -> Tensor:
        dtype = self._dense_dtype([shard for one in rows_of for shard in one])
        return load_dense(self._store, rows_of, dtype, self.device)

    def _dense_dtype(self, shards: list[TensorShard]) -> torch.dtype:
        if not self._keep_quantized:
            return torch.float32
        if self.device.type != "cpu":
            return self.dtype
        return common_dtype({self._form(shard) for shard in shards})

    def _vector_dtype(self) -> torch.dtype:
        return torch.float32

    def _shard(self, name: str) -> TensorShard:
        return self._find(self._index.get(name))

    def _find(self, tensor: ModelTensor) -> TensorShard:
        location = self._locations.get(tensor.name)
        if location is None:
            raise missing_tensor(tensor)
        held = self._slices.get(id(tensor.rule))  # of the index, which keeps it
        if held is None:
            held = self._slices[id(tensor.rule)] = self._share.slices(tensor.rule)
        return shard_of(tensor, location, held)

    def _expert_shards(
        self, layer: int, parts: Sequence[str], kind: str, only: Interval | None = None
    ) -> list[list[TensorShard]]:
        rules = [self._index.expert_rule(layer, part, kind) for part in parts]
        if any(rule is None for rule in rules):
            raise UnknownName("expert tensor", f"layers.{layer} {' '.join(parts)} {kind}", ["gate", "up", "down"])
        held = [rule for rule in rules if rule is not None]
        numbers = range(*self._share.experts(held[0].num_experts))[slice(*(only or (None, None)))]
        return [[self._find(ModelTensor(rule=rule, layer=layer, expert=number)) for rule in held] for number in numbers]

    def _report(self, shards: list[TensorShard], loaded: Loaded) -> Loaded:
        """Reports progress; each tensor counts once."""
        if self._progress is not None:
            for shard in shards:
                if shard.tensor.name not in self._counted:
                    self._counted.add(shard.tensor.name)
                    self._done += self._bytes(shard)
            if self._background is None:
                self._tell()
        return loaded

    def _tell(self) -> None:
        """What is on its way counts when it has been read."""
        if self._progress is not None:
            waiting = 0 if self._background is None else self._background.num_waiting
            self._told = max(self._told, self._done - waiting)
            self._progress(self._told, self._total)


def _is_tiled(shard: TensorShard) -> bool:
    """Every matrix of a layer except the router; the head stays dense."""
    return shard.tensor.layer is not None and len(shard.tensor.shape) == 2 and not shard.tensor.name.endswith(".router.weight")
