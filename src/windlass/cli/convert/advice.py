"""What to know before a conversion begins: that it would make the model larger, or much worse than it need be. Pure."""

from __future__ import annotations

from windlass.units import format_bytes

BLOCK_BITS = {
    "Q2_K": 2.6, "Q3_K": 3.4, "Q4_0": 4.5, "Q4_1": 5.0, "Q4_K": 4.5, "Q5_0": 5.5, "Q5_1": 6.0, "Q5_K": 5.5, "Q6_K": 6.6, "Q8_0": 8.5,
    "int4": 4.1, "int8": 8.1, "fp8": 8.0, "mxfp4": 4.25,
}  # fmt: skip
"""Bits per weight, scales included (ggml-common.h; ours in groups of 128)."""
COPIED = {"int4": "Q4_0", "int8": "Q8_0"}
"""Blocks whose codes conversion copies: nothing is lost."""


def warnings(stored_as: str, source_bytes: int, output_bytes: int, quant: str) -> tuple[str, ...]:
    """`stored_as`: how most matrices of the source are stored; empty: as plain numbers."""
    said: list[str] = []
    if source_bytes and output_bytes > source_bytes * 1.02:
        said.append(
            f"the result, {format_bytes(output_bytes)}, is larger than the source, {format_bytes(source_bytes)}"
            + (f" ({stored_as}); it gains no quality, and Windlass runs the source as it is" if stored_as else "")
        )
    if twice_quantized(stored_as, quant):
        said.append(
            f"the source is quantized already ({stored_as}, {BLOCK_BITS[stored_as]:g} bits a weight), and {quant} rounds it a second time: "
            "convert from the original weights if you can, or use --quant int8"
        )
    return tuple(said)


def offer(stored_as: str, quant: str, calibrated: bool) -> str:
    """Said after a conversion that could have lost less."""
    can = quant == "int4" and not calibrated and COPIED["int4"] != stored_as
    return "--calibrate self loses less: it takes minutes, and no data" if can else ""


def twice_quantized(stored_as: str, quant: str) -> bool:
    return quant == "int4" and BLOCK_BITS.get(stored_as, 16.0) < 7 and COPIED["int4"] != stored_as
