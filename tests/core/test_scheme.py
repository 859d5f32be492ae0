"""Bytes of packed matrices, by hand, and where they may be cut."""

from __future__ import annotations

import pytest

from windlass.core.layout import Layout
from windlass.core.place import local_bytes, place, stored
from windlass.core.rule import ModelPart
from windlass.core.scheme import PLANNED_NAMES, SCHEME_NAMES, Keep, Scheme, Stored, scheme
from windlass.errors import BadInput, UnknownName
from windlass.model.families import rules
from windlass.model.families.registry import find, spec_of
from windlass.units import GIB

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (scheme("bf16"), 2 * 4096 * 1024),
        (scheme("fp32"), 4 * 4096 * 1024),
        (scheme("fp8"), 4096 * 1024 + 4096 * 4),
        (scheme("int8"), 4096 * 1024 + 4096 * 8 * 2),
        (scheme("int4"), 4096 * 512 + 4096 * 8 * 2),
        (scheme("int4", group=32), 4096 * 512 + 4096 * 32 * 2),
        (scheme("int4", zero_points=True), 4096 * 512 + 4096 * 8 * 2 + 4096 * 8 // 2),
    ],
)
def test_bytes_of_a_matrix(how: Scheme, expected: int) -> None:
    """[4096, 1024]: codes, a 2-byte scale a group (4-byte a row in fp8), half a byte of zero point a group."""
    assert how.stored(Keep.QUANTIZE, 1024).matrix_bytes(4096, 1024) == expected


def test_mxfp4_packs_experts_only() -> None:
    how = scheme("mxfp4")
    assert how.stored(Keep.EXPERT, 2880).matrix_bytes(2880, 2880) == 2880 * 2880 // 2 + 2880 * 90
    assert how.stored(Keep.QUANTIZE, 2880).bits == 16


def test_zero_points_fill_whole_words() -> None:
    """Eight to an int32 along the output: ten rows take two words a group."""
    assert Stored(bits=4, group=32, scale_bytes=2, zero_points=True).matrix_bytes(10, 64) == 10 * 32 + 10 * 2 * 2 + 2 * 4 * 2


@pytest.mark.parametrize(
    ("asked", "row", "group"),
    [
        (128, 4096, 128),
        (128, 10944, 64),
        (128, 1408, 128),
        (128, 2880, 64),
        (128, 4128, 32),
        (64, 1408, 64),
        (64, 4128, 32),
        (32, 4096, 32),
    ],
)
def test_groups_that_divide(asked: int, row: int, group: int) -> None:
    found = scheme("int4", group=asked).stored(Keep.QUANTIZE, row)
    assert (found.bits, found.group) == (4, group)


def test_a_row_that_no_group_divides_stays_in_16_bits() -> None:
    found = scheme("int4").stored(Keep.QUANTIZE, 100)
    assert found == Stored(bits=16)
    assert found.matrix_bytes(7, 100) == 1400


def test_a_smaller_group_is_not_widened() -> None:
    """Asked for 32, a row of 64 stays at 32; asked for 64, a row of 128 * 3 stays at 64."""
    assert scheme("int4", group=32).stored(Keep.QUANTIZE, 64).group == 32
    assert scheme("int8", group=64).stored(Keep.QUANTIZE, 384).group == 64


def test_quantum() -> None:
    assert [scheme("bf16").stored(Keep.QUANTIZE, 128).quantum(dim) for dim in (0, 1)] == [1, 1]
    assert [scheme("int4").stored(Keep.QUANTIZE, 10944).quantum(dim) for dim in (0, 1)] == [1, 64]
    assert [scheme("int4", zero_points=True).stored(Keep.QUANTIZE, 4096).quantum(dim) for dim in (0, 1)] == [8, 128]
    assert [scheme("fp8").stored(Keep.QUANTIZE, 4096).quantum(dim) for dim in (0, 1)] == [1, 1]


def test_what_is_kept() -> None:
    for name in SCHEME_NAMES:
        assert scheme(name).stored(Keep.FLOAT32, 4096).bits == 32
    for name in ("fp8", "int8", "int4", "mxfp4"):
        assert scheme(name).stored(Keep.HIGH, 4096).bits == 16
        assert scheme(name).stored(Keep.QUANTIZE, 4096, is_head=True).bits == 16
        assert scheme(name).stored(Keep.EXPERT, 4096).bits == (8 if name in ("fp8", "int8") else 4)


def test_options() -> None:
    assert scheme("int4", group=64).group == 64
    assert scheme("bf16", group=64).group is None
    assert scheme("mxfp4", group=128).group == 32
    assert scheme("int4", zero_points=True).zero_points
    assert not scheme("int8", zero_points=True).zero_points
    assert scheme("int4", kv="fp8").kv_element_bytes == scheme("int4", kv="fp8").kv_vector_bytes == 1.0
    assert scheme("int4").kv_vector_bytes == 0
    assert scheme("int4").kv_element_bytes == 2.0


def test_refusals() -> None:
    with pytest.raises(UnknownName, match="int8"):
        scheme("int7")
    with pytest.raises(UnknownName, match="KV type"):
        scheme("int4", kv="int2")
    with pytest.raises(BadInput, match="group size 48"):
        scheme("int4", group=48)


def weights_gib(name: str, how: Scheme) -> float:
    """The model that runs, on one device: no MTP layer, no copies."""
    model = find(name)
    assert model is not None
    spec = spec_of(model)
    made = tuple(rule for rule in rules(spec) if rule.part is ModelPart.MAIN and rule.copy_of is None)
    placement = place(made, spec.num_layers, Layout(), how)
    return sum(local_bytes(rule, placement, how, 0) * rule.copies for rule in made) / GIB


def test_air_in_int4() -> None:
    """53.3 GiB at group 128."""
    assert weights_gib("GLM-4.5-Air", scheme("int4")) == pytest.approx(53.3, rel=0.03)


def test_air_in_bf16_is_two_bytes_a_parameter() -> None:
    """And four for the correction biases: 128 in each of 45 layers."""
    assert weights_gib("GLM-4.5-Air", scheme("bf16")) * GIB == 2 * 106_852_251_264 + 2 * 45 * 128


def test_published_sizes() -> None:
    """gpt-oss-120b ships as 60.8 GiB; DeepSeek-V3 in fp8 as a byte a parameter and what stays in 16 bits."""
    assert weights_gib("gpt-oss-120b", scheme("mxfp4")) == pytest.approx(60.8, rel=0.01)
    assert weights_gib("DeepSeek-V3", scheme("fp8")) == pytest.approx(671.03e9 / GIB, rel=0.01)


def test_stored_looks_at_the_whole_row() -> None:
    """The choice of group is made on the uncut matrix, so that all ranks store alike."""
    model = find("GLM-4.5-Air")
    assert model is not None
    down = next(rule for rule in rules(spec_of(model)) if rule.ours.endswith("layers.{layer}.ffn.down.weight"))
    assert stored(down, scheme("int4")).group == 64


GGUF_BLOCK_BYTES = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34), "q2_k": (256, 84), "q3_k": (256, 110),
    "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210), "iq1_s": (256, 50), "iq1_m": (256, 56), "iq2_xxs": (256, 66),
    "iq2_xs": (256, 74), "iq2_s": (256, 82), "iq3_xxs": (256, 98), "iq3_s": (256, 110), "iq4_xs": (256, 136), "iq4_nl": (32, 18),
}  # fmt: skip


@pytest.mark.parametrize("name", GGUF_BLOCK_BYTES)
def test_gguf_types_have_the_bytes_of_their_blocks(name: str) -> None:
    """ggml's type table."""
    size, num_bytes = GGUF_BLOCK_BYTES[name]
    assert scheme(name).stored(Keep.QUANTIZE, 4096).matrix_bytes(2, 4096) == 2 * 4096 // size * num_bytes


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("q4_k_m", 4.89),
        ("Q3_K_M", 4.0),
        ("q5-k-m", 5.7),
        ("iq3_m", 3.76),
        ("nvfp4", 4.5),
        ("int3", 3.125),
        ("int6", 6.125),
        ("awq", 4.16),
    ],
)
def test_bits_per_weight(name: str, bits: float) -> None:
    held = scheme(name).stored(Keep.QUANTIZE, 4096)
    assert held.matrix_bytes(4096, 4096) * 8 / 4096**2 == pytest.approx(bits, abs=0.03)


def test_gguf_types_pack_the_embedding_and_the_head() -> None:
    for name in ("q8_0", "q4_k_m"):
        how = scheme(name)
        assert how.stored(Keep.HIGH, 4096, is_lookup=True).bits < 16
        assert how.stored(Keep.HIGH, 4096, is_head=True).bits < 16
        assert how.stored(Keep.HIGH, 4096).bits == 16
    assert scheme("int4").stored(Keep.HIGH, 4096, is_lookup=True).bits == 16


def test_planned_schemes_are_not_what_the_engine_loads() -> None:
    assert not set(PLANNED_NAMES) & set(SCHEME_NAMES)
    assert scheme("q4_k", 64).group == 256
    assert scheme("gptq", 32).group == 32
    with pytest.raises(UnknownName):
        scheme("q9_k")
