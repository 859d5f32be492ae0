"""Blocks to float32: exactly what ggml's own Python package makes of the same bytes."""

from __future__ import annotations

import pytest
import torch

from windlass.errors import BadInput
from windlass.model.formats.gguf.blocks import DEQUANTIZE, check_type, dequantize
from windlass.model.formats.gguf.header import TYPES

pytestmark = pytest.mark.cpu

BYTES = {kind.name: kind.num_bytes for kind in TYPES.values()}
ELEMENTS = {kind.name: kind.elements for kind in TYPES.values()}


def random_blocks(name: str, count: int, seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, BYTES[name]), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("name", DEQUANTIZE)
def test_random_blocks_equal_the_gguf_package(name: str) -> None:
    """All bytes are random, so scales are NaN and infinite now and then too."""
    gguf = pytest.importorskip("gguf")
    import numpy

    blocks = random_blocks(name, 1024)
    with numpy.errstate(all="ignore"):
        expected = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name]).reshape(1024, ELEMENTS[name])
    ours = dequantize(name, blocks)
    assert ours.dtype == torch.float32
    assert numpy.array_equal(ours.numpy(), expected, equal_nan=True)


def block(*parts: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)[None]


def half(value: float) -> bytes:
    return torch.tensor([value], dtype=torch.float16).numpy().tobytes()


def test_q4_0_by_hand() -> None:
    """Byte j holds element j in its low half and element j + 16 in its high half."""
    values = dequantize("Q4_0", block(half(0.5), bytes([0x91] + [0x88] * 15)))[0]
    assert values[0] == 0.5 * (1 - 8)
    assert values[16] == 0.5 * (9 - 8)
    assert values[[*range(1, 16), *range(17, 32)]].abs().sum() == 0


def test_q5_1_by_hand() -> None:
    """Bit j of the 32-bit word is the fifth bit of element j."""
    values = dequantize("Q5_1", block(half(2.0), half(-1.0), (1 << 17).to_bytes(4, "little"), bytes([0, 0x30] + [0] * 14)))[0]
    assert values[17] == 2 * (16 + 3) - 1
    assert values[1] == -1


def test_q8_0_by_hand() -> None:
    values = dequantize("Q8_0", block(half(0.25), bytes([0x80, 0x7F, 1] + [0] * 29)))[0]
    assert values[:3].tolist() == [-32.0, 31.75, 0.25]


def test_a_type_that_is_not_read_is_named() -> None:
    with pytest.raises(BadInput, match=r"blk\.0\.w has type TQ1_0.*supported: F32"):
        check_type("blk.0.w", "TQ1_0")
