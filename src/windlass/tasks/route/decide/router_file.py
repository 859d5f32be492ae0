"""A fitted router as one JSON file, and decisions from it in well under a millisecond. Arrays are base64 of little-endian numbers."""

from __future__ import annotations

from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windlass.core.model import Frozen
from windlass.errors import BadInput, UnknownName
from windlass.tasks.route.features.ngrams import BITS, NUM_FEATURES

FORMAT = "windlass-router-1"


class Packed(Frozen):
    dtype: str
    shape: tuple[int, ...]
    data: str

    def array(self, dtype: str = "<f4") -> NDArray[Any]:
        try:
            raw = np.frombuffer(b64decode(self.data, validate=True), self.dtype)
            return raw.reshape(self.shape).astype(dtype)
        except (ValueError, TypeError) as error:
            raise BadInput(f"the router's file is damaged ({error}); fit it again") from None


def pack(array: NDArray[Any], dtype: str = "<f2") -> Packed:
    made = np.ascontiguousarray(array.astype(dtype))
    return Packed(dtype=dtype, shape=tuple(made.shape), data=b64encode(made.tobytes()).decode())


class RoutedModel(Frozen):
    """What is known of a model from the table."""

    name: str
    score: float
    cost: float
    """Mean, of one answer."""
    seconds: float | None = None
    joules: float | None = None


class PathPoint(Frozen):
    """What a tolerance would have given on held-out prompts."""

    tolerance: float
    score: float
    cost: float
    seconds: float | None = None
    joules: float | None = None
    share: dict[str, float] = {}


class Confident(Frozen):
    """Keep an answer whose confidence is at least this; a logistic rule over `decide/confidence.py`'s numbers."""

    model: str
    weights: dict[str, float]
    bias: float
    threshold: float
    low: float
    high: float
    """5 and 95 % of the confidences it was calibrated on: live ones outside mean drift."""
    num_answers: int = 0
    auc: float | None = None


class RouterFile(Frozen):
    format: str
    models: tuple[RoutedModel, ...]
    """Cheapest first."""
    best: int
    """The best single model."""
    tolerance: float
    """Calibrated to the floor."""
    floor: float
    confidence: float
    cost_unit: str
    num_prompts: int
    bits: int
    penalty: float
    share_of_sources: float
    columns: Packed
    """The features that were seen: `rarity` and `words` are of these."""
    rarity: Packed
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    bias: tuple[float, ...]
    words: Packed
    shape: Packed
    max_novelty: float
    """Prompts with a larger share of unseen n-grams are unlike the data."""
    path: tuple[PathPoint, ...]
    mean_chance: float
    low_chance: float = 0.0
    """Of the chosen model, 5 % of held-out prompts are below it."""
    centroids: Packed | None = None
    means: Packed | None = None
    confident: tuple[Confident, ...] = ()
    report: dict[str, Any] = {}
    """As `windlass route report --json` prints it."""

    def number(self, name: str) -> int:
        for place, model in enumerate(self.models):
            if model.name == name:
                return place
        raise UnknownName("model of this router", name, [model.name for model in self.models])


def decode_router(raw: bytes, where: str) -> RouterFile:
    try:
        found = msgspec.json.decode(raw, type=RouterFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"{where} is not a router: {error}; make one with `windlass route fit`") from None
    if found.format != FORMAT or found.bits != BITS:
        raise BadInput(f"{where} was made by another version of Windlass ({found.format}); fit it again")
    used = found.columns.shape
    sizes = (
        len(used) == 1
        and used[0] <= NUM_FEATURES
        and found.words.shape == (len(found.models), *used)
        and found.rarity.shape == used
    )
    if not sizes or not 0 <= found.best < len(found.models) or len(found.bias) != len(found.models):
        raise BadInput(f"{where} is damaged: its sizes do not agree; fit it again")
    return found


def read_router(path: Path) -> RouterFile:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}; make a router with `windlass route fit`") from None
    return decode_router(raw, str(path))


def encode_router(router: RouterFile) -> bytes:
    return msgspec.json.encode(router)
