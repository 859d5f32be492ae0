"""Quantization to the bit: against the per-block writer in bench/, and against a scalar reference written here."""

from __future__ import annotations

import importlib.util
import io
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from windlass.errors import BadInput
from windlass.model.formats.dllama.blocks import SLICE_ELEMENTS, decode, encode
from windlass.model.formats.dllama.file import WeightType

pytestmark = pytest.mark.cpu

_module = importlib.util.spec_from_file_location(
    "dllama_reference", Path(__file__).parents[4] / "bench" / "convert" / "dllama_reference.py"
)
assert _module is not None and _module.loader is not None
reference = importlib.util.module_from_spec(_module)
_module.loader.exec_module(reference)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _hard_blocks() -> torch.Tensor:
    """Zeros, ties of +max and -max in both orders, negative extremes, halves that round, tiny and subnormal numbers, large ones."""
    ramp = torch.linspace(-1, 1, 32)
    rows = [
        torch.zeros(32),
        ramp,
        ramp.flip(0),
        -torch.linspace(0, 3, 32),
        torch.linspace(0, 3, 32),
        torch.arange(32).float() - 16,
        (torch.arange(32).float() - 16) / 2,
        (torch.arange(32).float() * 2 - 127) / 127,
        torch.cat([torch.tensor([-8.0, 8.0]), torch.arange(30) / 2 - 7.5]),
        ramp * 1e-6,
        ramp * 1e-30,
        torch.cat([torch.zeros(16), torch.full((16,), 1e-40)]),
        torch.cat([torch.zeros(16), torch.full((16,), -1e-39)]),
        ramp * 5e5,
        torch.full((32,), -0.37),
    ]
    return torch.stack(rows)


def _scalar_q40(block: np.ndarray) -> bytes:
    """One block as facts give the rule, number by number, in float32."""
    high, low = max(block), min(block)
    extreme = low if -low > high else high
    delta = np.float32(extreme) / np.float32(-8)
    inverse = np.float32(1) / delta if delta != 0 else np.float32(0)
    codes = [int(min(max(np.float32(value * inverse) + np.float32(8.5), 0), 15)) for value in block]
    return struct.pack("<e16B", np.float16(delta), *(codes[index] | codes[index + 16] << 4 for index in range(16)))


def _scalar_q80(block: np.ndarray) -> bytes:
    delta = np.float32(max(abs(block))) / np.float32(127)
    inverse = np.float32(1) / delta if delta != 0 else np.float32(0)
    return struct.pack("<e32b", np.float16(delta), *(int(np.rint(value * inverse)) for value in block))


def _written(rows: torch.Tensor, kind: str) -> bytes:
    file = io.BytesIO()
    reference.write_tensor(file, rows, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["q40", "q80", "f16", "f32"])
def test_bytes_equal_the_per_block_writer(kind: str) -> None:
    rows = torch.randn(40, 320, generator=_generator()) * torch.logspace(-7, 2, 40)[:, None]
    for source in (rows, rows.bfloat16(), rows.half(), _hard_blocks() if kind != "f16" else _hard_blocks().clamp(-6e4, 6e4)):
        assert encode(source, WeightType[kind.upper()]).tobytes() == _written(source, kind)


@pytest.mark.parametrize(("kind", "scalar"), [("q40", _scalar_q40), ("q80", _scalar_q80)])
def test_bytes_equal_a_scalar_reference(kind: str, scalar: object) -> None:
    rows = torch.cat([torch.randn(64, 32, generator=_generator()).bfloat16().float(), _hard_blocks()[:11], _hard_blocks()[13:]])
    assert encode(rows, WeightType[kind.upper()]).tobytes() == b"".join(scalar(block) for block in rows.numpy())  # type: ignore[operator]


def test_slices_do_not_show() -> None:
    rows = torch.randn(3, SLICE_ELEMENTS // 2, generator=_generator())
    parts = [encode(row, WeightType.Q40).tobytes() for row in rows]
    assert encode(rows, WeightType.Q40).tobytes() == b"".join(parts)


def test_a_tie_takes_the_positive_extreme() -> None:
    """ggml takes the first of the two; the converter the positive one, wherever it stands."""
    block = torch.zeros(1, 32)
    block[0, 0], block[0, 9] = -4.0, 4.0
    assert struct.unpack("<e", encode(block, WeightType.Q40)[:2].tobytes()) == (-0.5,)


def test_the_sign_of_zeros_does_not_show() -> None:
    for zeros in (torch.zeros(1, 32), -torch.zeros(1, 32), torch.tensor([[0.0, -0.0] * 16])):
        assert encode(zeros, WeightType.Q40).tobytes() == b"\x00\x80" + b"\x88" * 16
        assert encode(zeros, WeightType.Q80).tobytes() == bytes(34)


@pytest.mark.parametrize("kind", [WeightType.Q40, WeightType.Q80])
def test_decoded_is_within_half_a_step(kind: WeightType) -> None:
    rows = torch.randn(16, 256, generator=_generator())
    back = decode(encode(rows, kind), kind, 256)
    extreme = rows.view(-1, 32).abs().amax(1, keepdim=True)
    # Half a step, a step for Q40 values opposite to the extreme (code 16 does not exist), and fp16's rounding of the scale.
    bound = extreme / 8 * 1.01 if kind is WeightType.Q40 else extreme / 127 * 0.51 + extreme * 2**-11
    assert ((back - rows).view(-1, 32).abs() <= bound).all()


@pytest.mark.parametrize("kind", list(WeightType))
def test_encoding_what_was_decoded_changes_nothing(kind: WeightType) -> None:
    first = encode(torch.randn(16, 256, generator=_generator()).clamp(-3, 3), kind)
    assert encode(decode(first.copy(), kind, 256), kind).tobytes() == first.tobytes()


def test_layout_of_a_block() -> None:
    """Low nibbles are the first half, high ones the second; value = (nibble - 8) * scale."""
    block = np.frombuffer(struct.pack("<e16B", 0.5, *(index | (15 - index) << 4 for index in range(16))), dtype=np.uint8)
    expected = [(index - 8) / 2 for index in range(16)] + [(15 - index - 8) / 2 for index in range(16)]
    assert decode(block, WeightType.Q40, 32).tolist() == [expected]


@pytest.mark.parametrize("kind", list(WeightType))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused(kind: WeightType, bad: float) -> None:
    rows = torch.zeros(4, 64)
    rows[3, 40] = bad
    with pytest.raises(BadInput, match="NaN or infinite"):
        encode(rows, kind)


@pytest.mark.parametrize(("kind", "value"), [(WeightType.F16, 7e4), (WeightType.Q40, 6e5), (WeightType.Q80, 1e7)])
def test_what_16_bits_cannot_hold_is_refused(kind: WeightType, value: float) -> None:
    with pytest.raises(BadInput, match="overflows fp16"):
        encode(torch.full((1, 32), value), kind)
