"""4-bit weights in the tile layout of the CUDA kernels, and repacking from a checkpoint's layout.

A tile is 16 rows; along the inputs it is a run of blocks of 128 inputs: 1,024 bytes of codes, then the scales,
bf16 [128 / group][8][2]: row g beside row g + 8.
A block's codes are two halves of 64 inputs; lane l = 4 g + t of a warp has 16 bytes of a half, word s of them for inputs 16 s .. 16 s + 15:
what one tensor-core step takes of rows g and g + 8, inputs 2 t, 2 t + 1, 2 t + 8, 2 t + 9; nibbles 0, 4, 2, 6 are row g, 1, 5, 3, 7 row g + 8.
So a word becomes four pairs of numbers with one mask each, a warp's load is 512 bytes in one piece, and a tile streams as one.
Rows of `paired` matrices (gate, then up) are dealt 8 and 8, so that a tile has both halves of 8 results.
Inputs are zero-padded to a multiple of 128, and further where that number of blocks does not divide among warps (`Tiles.width`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from windlass.core.fused import BLOCK_INPUTS, TILE_ROWS, num_blocks
from windlass.errors import BadInput
from windlass.runtime.kernels.cuda import driver


@dataclass(frozen=True)
class Tiles:
    """`num_matrices` matrices [rows, inputs], one after another."""

    data: Tensor
    """uint8 [num_matrices, rows / 16, blocks, block bytes]"""
    rows: int
    inputs: int
    group: int
    paired: bool = False

    @property
    def num_matrices(self) -> int:
        return self.data.shape[0]

    @property
    def num_tiles(self) -> int:
        """Of one matrix."""
        return self.data.shape[1]

    @property
    def tile_blocks(self) -> int:
        return self.data.shape[2]

    @property
    def block_bytes(self) -> int:
        return self.data.shape[3]

    @property
    def tile_bytes(self) -> int:
        return self.tile_blocks * self.block_bytes

    @property
    def width(self) -> int:
        """Inputs with padding: activations must be as wide, zero-padded."""
        return self.tile_blocks * BLOCK_INPUTS

    @property
    def num_bytes(self) -> int:
        return self.data.numel()

    def part(self, first: int, last: int) -> Tiles:
        return replace(self, data=self.data[first:last])


def joined(first: Tiles, second: Tiles) -> Tiles:
    """The matrices of both: a view where the second lie behind the first in one tensor, else a copy."""
    shape = (first.num_matrices + second.num_matrices, *first.data.shape[1:])
    together = (
        first.data.untyped_storage().data_ptr() == second.data.untyped_storage().data_ptr()
        and first.data.is_contiguous()
        and second.data.storage_offset() == first.data.storage_offset() + first.num_bytes
    )
    data = first.data.as_strided(shape, first.data.stride()) if together else torch.cat((first.data, second.data))
    return replace(first, data=data)


def block_bytes(group: int) -> int:
    return TILE_ROWS * BLOCK_INPUTS // 2 + BLOCK_INPUTS // group * TILE_ROWS * 2


def empty(
    num_matrices: int, rows: int, inputs: int, group: int, *, paired: bool = False, device: torch.device | str = "cuda"
) -> Tiles:
    if group not in (32, 64, 128) or inputs % group or rows % TILE_ROWS:
        raise BadInput(
            f"4-bit weights [{rows}, {inputs}] in groups of {group} do not fit tiles: "
            "groups must be 32, 64 or 128 and divide the inputs, rows a multiple of 16"
        )
    shape = (num_matrices, rows // TILE_ROWS, num_blocks(inputs), block_bytes(group))
    return Tiles(torch.empty(shape, dtype=torch.uint8, device=device), rows, inputs, group, paired)


def repack(codes: Tensor, scales: Tensor, *, paired: bool = False, out: Tiles | None = None, first: int = 0) -> Tiles:
    """codes int32 [(matrices,) rows, inputs / 8], eight in order to a word, each plus 8; scales bf16 [(matrices,) rows, inputs / group].

    With `out`, into its matrices from `first` on, so that experts can be streamed into one allocation.
    """
    codes, scales = (x if x.dim() == 3 else x[None] for x in (codes, scales))
    num_matrices, rows, inputs = codes.shape[0], codes.shape[1], codes.shape[2] * 8
    group = inputs // scales.shape[2]
    out = out or empty(num_matrices, rows, inputs, group, paired=paired, device=codes.device)
    assert (out.rows, out.inputs, out.group, out.paired) == (rows, inputs, group, paired)
    part = out.data[first : first + num_matrices]
    if codes.is_cuda:
        _repack_cuda(codes.contiguous(), scales.to(torch.bfloat16).contiguous(), part, out)
    else:
        part.copy_(_reference(codes, scales, out))
    return out


def fits_tiles(rows: int, inputs: int, group: int = BLOCK_INPUTS) -> bool:
    return rows % TILE_ROWS == 0 and inputs % group == 0


def quantized(weight: Tensor, group: int = BLOCK_INPUTS, rows_at_once: int = 8192) -> Tiles:
    """Of weight [rows, inputs], rounded to nearest; the number furthest from zero of a group is its lowest code."""
    rows, inputs = weight.shape
    codes = torch.empty(rows, inputs // 8, dtype=torch.int32, device=weight.device)
    scales = torch.empty(rows, inputs // group, dtype=torch.bfloat16, device=weight.device)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=weight.device)
    for first in range(0, rows, rows_at_once):
        part = weight[first : first + rows_at_once].float().unflatten(1, (-1, group))
        furthest = part.gather(2, part.abs().argmax(2, keepdim=True))
        scale = (furthest / -8).to(torch.bfloat16)
        nibbles = (part / scale.float()).nan_to_num(0, 0, 0).round_().clamp_(-8, 7).to(torch.int32) + 8
        codes[first : first + rows_at_once] = (nibbles.view(-1, inputs // 8, 8) << shifts).sum(-1).to(torch.int32)
        scales[first : first + rows_at_once] = scale[..., 0]
    return repack(codes, scales)


def random(
    num_matrices: int,
    rows: int,
    inputs: int,
    group: int,
    deviation: float,
    *,
    paired: bool = False,
    device: torch.device | str = "cuda",
    seed: int = 0,
) -> Tiles:
    """Random codes and signs of scales; for benchmarks.

    Uniform codes have a mean of -0.5, which random signs cancel: otherwise all rows of activations would become alike.
    """
    made = empty(num_matrices, rows, inputs, group, paired=paired, device=device)
    source = torch.Generator(device).manual_seed(seed)
    codes, scales = made.data[..., : TILE_ROWS * BLOCK_INPUTS // 2], made.data[..., TILE_ROWS * BLOCK_INPUTS // 2 :]
    for matrix in range(num_matrices):  # one at a time: random numbers take a second copy
        codes[matrix] = torch.randint(0, 256, codes[matrix].shape, dtype=torch.uint8, device=device, generator=source)
    signs = torch.randint(0, 2, (*scales.shape[:3], scales.shape[3] // 2), dtype=torch.int8, device=device, generator=source)
    drawn = signs * 2 - 1
    # Standard deviation of 16 uniform codes.
    scales.copy_((drawn.to(torch.bfloat16) * (deviation / ((16**2 - 1) / 12) ** 0.5)).view(torch.uint8))
    _clear_padding(made)
    return made


def _clear_padding(made: Tiles) -> None:
    """Zero scales for padding inputs."""
    first, rest = divmod(made.inputs, BLOCK_INPUTS)
    tail = made.data[..., TILE_ROWS * BLOCK_INPUTS // 2 :].unflatten(-1, (BLOCK_INPUTS // made.group, -1))
    if rest:
        tail[..., first, rest // made.group :, :] = 0
        first += 1
    tail[..., first:, :, :] = 0


class TileLoader:
    """Tiles filled from a checkpoint's rows as they are read; a matrix is repacked on the device once all of its rows are loaded."""

    def __init__(self, tiles: Tiles) -> None:
        self.tiles, device = tiles, tiles.data.device
        self._codes = torch.empty(tiles.rows, tiles.inputs // 8, dtype=torch.int32, device=device)
        self._scales = torch.empty(tiles.rows, tiles.inputs // tiles.group, dtype=torch.bfloat16, device=device)
        self._num_put = 0

    def put(self, row: int, codes: Tensor, scale: Tensor, matrix: int) -> None:
        """Rows from `row` on, all inputs. Matrices must be loaded one after another."""
        self._codes[row : row + len(codes)].copy_(codes, non_blocking=True)
        self._scales[row : row + len(codes)].copy_(scale, non_blocking=True)
        self._num_put += len(codes)
        if self._num_put == self.tiles.rows:
            repack(self._codes, self._scales, paired=self.tiles.paired, out=self.tiles, first=matrix)
            self._num_put = 0


def _repack_cuda(codes: Tensor, scales: Tensor, part: Tensor, out: Tiles) -> None:
    run = driver.kernel("small.cu", "PPPIIIIQ", "repack", packed=False, GROUP=out.group)
    blocks = part.shape[0] * part.shape[1] * part.shape[2]
    run(
        (-(-blocks // 8),),
        256,
        codes,
        scales,
        part,
        out.rows,
        out.inputs,
        out.tile_blocks,
        int(out.paired),
        blocks,
        dependent=False,
    )


def _dealt(x: Tensor, paired: bool) -> Tensor:
    """[m, rows, n] to [m, tiles, 16, n]."""
    m, rows, n = x.shape
    if not paired:
        return x.reshape(m, rows // TILE_ROWS, TILE_ROWS, n)
    return x.reshape(m, 2, rows // TILE_ROWS, TILE_ROWS // 2, n).transpose(1, 2).reshape(m, rows // TILE_ROWS, TILE_ROWS, n)


def _reference(codes: Tensor, scales: Tensor, out: Tiles) -> Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
    nibbles = (codes[..., None] >> shifts & 15).flatten(-2).to(torch.uint8)
    padding = out.tile_blocks * BLOCK_INPUTS - out.inputs
    nibbles = torch.nn.functional.pad(nibbles, (0, padding), value=8)
    scales = torch.nn.functional.pad(scales.to(torch.bfloat16), (0, padding // out.group))
    # [m, tile, high, g, block, half, s, pair, t, element] -> words whose nibble is 4 * element + 2 * pair + high
    n = _dealt(nibbles, out.paired).reshape(-1, out.num_tiles, 2, 8, out.tile_blocks, 2, 4, 2, 4, 2)
    n = n.permute(0, 1, 4, 5, 3, 8, 6, 9, 7, 2).reshape(-1, out.num_tiles, out.tile_blocks, 1024, 2)
    packed = n[..., 0] | n[..., 1] << 4
    tail = _dealt(scales, out.paired).reshape(-1, out.num_tiles, TILE_ROWS, out.tile_blocks, BLOCK_INPUTS // out.group)
    tail = tail.unflatten(2, (2, 8)).permute(0, 1, 4, 5, 3, 2).contiguous().view(torch.uint8).flatten(3)
    return torch.cat((packed, tail), dim=-1)


def dequantize(tiles: Tiles, dtype: torch.dtype = torch.float32) -> Tensor:
    """[matrices, rows, inputs]: what the kernels multiply with. Plain torch."""
    m, num_tiles, blocks, _ = tiles.data.shape
    codes, tail = tiles.data[..., :1024], tiles.data[..., 1024:]
    n = torch.stack((codes & 15, codes >> 4), dim=-1).reshape(m, num_tiles, blocks, 2, 8, 4, 4, 2, 2, 2)
    n = n.permute(0, 1, 9, 4, 2, 3, 6, 8, 5, 7).reshape(
        m, num_tiles, TILE_ROWS, blocks * BLOCK_INPUTS // tiles.group, tiles.group
    )
    scales = tail.contiguous().view(torch.bfloat16).reshape(m, num_tiles, -1, 8, 2).permute(0, 1, 4, 3, 2).flatten(2, 3)
    values = ((n.to(torch.float32) - 8) * scales[..., None].to(torch.float32)).to(dtype).flatten(3)[..., : tiles.inputs]
    if tiles.paired:
        values = values.reshape(m, num_tiles, 2, 8, tiles.inputs).transpose(1, 2)
    return values.reshape(m, tiles.rows, tiles.inputs)
