"""AWQ and GPTQ checkpoints as a TensorStore: their 4-bit matrices under the names and in the layout of compressed-tensors.

Both store a matrix as [in, out] with a scale and a zero point per group of inputs and output: value = (code - zero) * scale.

  GPTQ   qweight [in / 8, out]: eight inputs to a word; qzeros [groups, out / 8] hold zero - 1 (AutoGPTQ's first format)
  AWQ    qweight [in, out / 8]: eight outputs to a word, in the order 0 2 4 6 1 3 5 7; qzeros [groups, out / 8] alike

The codes and scales stay as they are; only their places change. One matrix is rearranged at a time and kept until another is asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from windlass.core.ports import TensorStore
from windlass.errors import BadCheckpoint, Impossible

METHODS = ("awq", "gptq")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PER_WORD = 8
PARTS = ("qweight", "qzeros", "scales", "g_idx")


class ColumnPackedStore:
    """Wraps the store of the files."""

    def __init__(self, store: TensorStore, section: dict[str, Any]) -> None:
        self._store, self._section = store, section
        self.config = store.config
        self.method = str(section.get("quant_method"))
        self._check()
        stems = {name.removesuffix(".qweight") for name in store.names() if name.endswith(".qweight")}
        self._shapes = {stem: self._matrix_shape(stem) for stem in stems}
        hidden = {f"{stem}.{part}" for stem in stems for part in PARTS}
        self._names = frozenset(set(store.names()) - hidden | {f"{stem}.{part}" for stem in stems for part in self._parts()})
        self._kept: tuple[str, dict[str, Tensor]] = ("", {})
        self._lock = Lock()

    def _parts(self) -> tuple[str, ...]:
        zeros = () if self.symmetric else ("weight_zero_point",)
        return ("weight_packed", "weight_scale", "weight_shape", *zeros)

    @property
    def symmetric(self) -> bool:
        """All zero points are 8, as ours are without any."""
        return self.method == "gptq" and self._section.get("sym") is True

    def _check(self) -> None:
        section = self._section
        bits = section.get("bits", section.get("w_bit"))
        if bits != 4:
            raise Impossible(
                f"{self.method.upper()} checkpoints are read with 4 bits, not {bits!r:.20}; use the original weights"
            )
        if section.get("desc_act"):
            raise Impossible(
                "GPTQ with activation order (desc_act) is not supported; use a checkpoint without it, or the original weights"
            )
        if self.method == "awq" and str(section.get("version", "gemm")).lower() != "gemm":
            raise Impossible(f"AWQ version {section['version']!r:.20} is not supported; only gemm is")

    def _matrix_shape(self, stem: str) -> tuple[int, int]:
        rows, columns = self._store.shape(f"{stem}.qweight")
        return (columns, rows * PER_WORD) if self.method == "gptq" else (columns * PER_WORD, rows)

    # --- TensorStore

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        stem, part = _split(name)
        if stem not in self._shapes or name not in self._names or name in self._store.names():
            return self._store.shape(name)
        (num_out, num_in), groups = self._shapes[stem], self._store.shape(f"{stem}.scales")[0]
        return {
            "weight_packed": (num_out, num_in // PER_WORD),
            "weight_scale": (num_out, groups),
            "weight_zero_point": (num_out // PER_WORD, groups),
            "weight_shape": (2,),
        }[part]

    def dtype(self, name: str) -> str:
        stem, part = _split(name)
        if stem not in self._shapes or name in self._store.names():
            return self._store.dtype(name)
        return {"weight_scale": self._store.dtype(f"{stem}.scales"), "weight_shape": "I64"}.get(part, "I32")

    def read(self, name: str, start: int, stop: int) -> Tensor:
        stem, part = _split(name)
        if stem not in self._shapes or name in self._store.names():
            return self._store.read(name, start, stop)
        if part == "weight_shape":
            return torch.tensor(self._shapes[stem])[start:stop]
        return self._matrix(stem)[part][start:stop]

    def close(self) -> None:
        self._kept = ("", {})
        self._store.close()

    # --- rearranging

    def _matrix(self, stem: str) -> dict[str, Tensor]:
        with self._lock:
            if self._kept[0] != stem:
                self._kept = (stem, self._rearranged(stem))
            return self._kept[1]

    def _rearranged(self, stem: str) -> dict[str, Tensor]:
        words, scales, zeros = (self._whole(f"{stem}.{part}") for part in ("qweight", "scales", "qzeros"))
        packed = words.T.contiguous() if self.method == "gptq" else pack(unpack_awq(words).T.contiguous())
        made = {"weight_packed": packed, "weight_scale": scales.T.contiguous()}
        if not self.symmetric:
            made["weight_zero_point"] = pack(self._zeros(zeros, stem)).T.contiguous()
        return made

    def _zeros(self, words: Tensor, stem: str) -> Tensor:
        """[groups, out], 0..15."""
        if self.method == "awq":
            return unpack_awq(words)
        found = unpack(words) + 1
        if bool((found > 15).any()):
            raise BadCheckpoint("a zero point of 16 does not fit into 4 bits", tensor=f"{stem}.qzeros")
        return found

    def _whole(self, name: str) -> Tensor:
        return self._store.read(name, 0, self._store.shape(name)[0])


def _split(name: str) -> tuple[str, str]:
    stem, _, part = name.rpartition(".")
    return stem, part


def unpack(words: Tensor) -> Tensor:
    """int32 [.., n] to codes [.., 8 n], the lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return torch.bitwise_and(torch.bitwise_right_shift(words.unsqueeze(-1), shifts), 15).flatten(-2)


def unpack_awq(words: Tensor) -> Tensor:
    order = torch.tensor(AWQ_ORDER).argsort()
    codes = unpack(words)
    return codes.reshape(*codes.shape[:-1], -1, PER_WORD)[..., order].flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """The inverse of `unpack`."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int64)
    words = torch.bitwise_left_shift(codes.long().reshape(*codes.shape[:-1], -1, PER_WORD), shifts).sum(-1)
    return words.where(words < 2**31, words - 2**32).to(torch.int32)
