"""What a prompt looks like, whatever its words: length, lines, numbers, signs, code. One row of NUM_SHAPE numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from windlass.tasks.route.features.text import looked_at

_CLASSES = (
    "0123456789",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "+-*/=^<>{}[]()_\\|$%#&@~`",
    "\n",
    " ",
    ".,;:",
    "?",
    "abcdefghijklmnopqrstuvwxyz",
)
_TABLE = np.zeros((len(_CLASSES) + 1, 256))
for _row, _characters in enumerate(_CLASSES):
    _TABLE[_row, np.frombuffer(_characters.encode(), np.uint8)] = 1.0
_TABLE[-1, 128:] = 1.0  # bytes of other scripts
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_CODE = re.compile(r"```|\bdef |\breturn\b|\bimport |;\n|\{\n|=>|\(\)|#include|\bfunction\b|\bclass \w+[:({]")
NUM_SHAPE = 14
SHAPE_SCALE = 0.1
"""Rows of n-grams have length 1; a column of the shape has this spread, so that the same penalty holds it about as tightly."""
MAX_DEVIATIONS = 4.0
"""Beyond so many standard deviations a prompt is as unusual as it can be: one very long prompt must not decide by its length alone."""


def shape_of(text: str) -> NDArray[np.float64]:
    seen = looked_at(text)
    raw = np.frombuffer(seen.encode("utf-8", "surrogatepass"), np.uint8)
    digits, upper, signs, lines, spaces, stops, questions, lower, other = (_TABLE @ np.bincount(raw, minlength=256)).tolist()
    size = len(raw) + 1.0
    words = spaces + lines + 1.0
    numbers, code = len(_NUMBER.findall(seen)), len(_CODE.findall(seen))
    return np.array(
        [
            np.log(len(text) + 1.0), np.log1p(lines), digits / size, upper / size, signs / size, other / size,
            np.log1p(numbers), size / words, np.log1p(questions), stops / words, np.log1p(code), np.log1p(signs),
            np.log1p(upper), lower / size,
        ]
    )  # fmt: skip


def shapes_of(texts: Sequence[str]) -> NDArray[np.float64]:
    return np.array([shape_of(text) for text in texts]).reshape(len(texts), NUM_SHAPE)


def expanded(shapes: NDArray[np.float64], mean: NDArray[np.float64], deviation: NDArray[np.float64]) -> NDArray[np.float32]:
    """In standard deviations, and their squares: difficulty may grow with length and fall again."""
    found = np.empty((*shapes.shape[:-1], 2 * shapes.shape[-1]), dtype=np.float32)
    units, squares = found[..., : shapes.shape[-1]], found[..., shapes.shape[-1] :]
    np.subtract(shapes, mean, out=units, casting="same_kind")
    np.divide(units, deviation, out=units, casting="same_kind")
    np.clip(units, -MAX_DEVIATIONS, MAX_DEVIATIONS, out=units)
    np.multiply(units, units, out=squares)
    squares -= 1.0
    found *= SHAPE_SCALE
    return found
