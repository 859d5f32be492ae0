"""ggml's block types as kernels hold them: the same codes and scales, laid out so that vector instructions can take them apart.

A row's block is `halves` numbers of 16 bits (scale, minimum), `singles` bytes (scales and minimums of groups, one to a byte) and `words` of
32 bits (codes). Codes of 32 inputs are "chunks" of 4 bytes each, chunk c the inputs 4c .. 4c + 3, of which `words` hold, one after another:

    low    4 words: byte j = chunk 2w | chunk 2w + 1 << 4     (four bits)
    pairs  2 words: the sum over k of chunk 4w + k << 2k      (two bits)
    bits   1 word: the sum over c of chunk c << c             (one bit)

    q4_k iq4_nl iq4_xs mxfp4    low
    q5_0 q5_1 q5_k              low, bits of the fifth bit
    q6_k                        low, pairs of the fifth and sixth
    q2_k                        pairs
    q3_k                        pairs, bits of the third
    iq2_* iq3_*                 indices of grids and signs, as in the file
"""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    elements: int
    """Of a block."""
    halves: int
    singles: int
    words: int
    stored_bytes: int
    """Of a block in the file (ggml-common.h)."""

    @property
    def num_bytes(self) -> int:
        return 2 * self.halves + self.singles + 4 * self.words


FORMS = {
    "q2_k": Form(256, 2, 16, 16, 84),
    "q3_k": Form(256, 1, 16, 24, 110),
    "q4_k": Form(256, 2, 16, 32, 144),
    "q5_k": Form(256, 2, 16, 40, 176),
    "q6_k": Form(256, 1, 16, 48, 210),
    "q5_0": Form(32, 1, 0, 5, 22),
    "q5_1": Form(32, 2, 0, 5, 24),
    "iq4_nl": Form(32, 1, 0, 4, 18),
    "iq4_xs": Form(256, 1, 8, 32, 136),
    "mxfp4": Form(32, 0, 1, 4, 17),
    "iq2_xxs": Form(256, 1, 0, 16, 66),
    "iq2_xs": Form(256, 1, 8, 16, 74),
    "iq2_s": Form(256, 1, 16, 16, 82),
    "iq3_xxs": Form(256, 1, 0, 24, 98),
    "iq3_s": Form(256, 1, 12, 24, 110),
}
"""By ggml's name in lower case, in the order of `Kind` in runtime/kernels/native/panel/panel.h. Q4_0, Q4_1 and Q8_0 have kinds of their own."""

_OTHERS = {"F32": 32.0, "F16": 16.0, "BF16": 16.0, "Q4_0": 4.5, "Q4_1": 5.0, "Q8_0": 8.5}


def is_held(type_name: str) -> bool:
    """Whether a matrix of this type (`Q4_K`) stays in memory as it is."""
    return type_name.lower() in FORMS or type_name in _OTHERS


def held_bits(type_name: str) -> float:
    """Bits per weight in memory of a matrix that a file stores in this type (`Q4_K`), scales included."""
    form = FORMS.get(type_name.lower())
    return _OTHERS[type_name] if form is None else 8 * form.num_bytes / form.elements


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""E2M1 by code (OCP Microscaling Formats, revision 1.0), twice: integers."""
