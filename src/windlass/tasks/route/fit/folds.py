"""Which rows are held out. Equal prompts always stay on one side; by groups, whole sources do."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np
from numpy.typing import NDArray

NUM_FOLDS = 5
By = Literal["prompts", "groups"]


@dataclass(frozen=True, slots=True)
class Fold:
    train: NDArray[np.int64]
    held_out: NDArray[np.int64]


def clusters_of(prompts: Sequence[str], groups: Sequence[str], by: By) -> list[Hashable]:
    """Rows that must not be separated: a question repeated in training would be known by heart."""
    if by == "groups":
        return list(groups)
    return [
        blake2b(" ".join(prompt.lower().split()).encode("utf-8", "surrogatepass"), digest_size=16).digest() for prompt in prompts
    ]


def make_folds(clusters: Sequence[Hashable], num_folds: int = NUM_FOLDS, seed: int = 0) -> list[Fold]:
    """Clusters in random order, each into the smallest fold so far."""
    places: dict[Hashable, list[int]] = {}
    for place, cluster in enumerate(clusters):
        places.setdefault(cluster, []).append(place)
    order = list(places.values())
    np.random.default_rng(seed).shuffle(order)  # type: ignore[arg-type]
    order.sort(key=len, reverse=True)  # large clusters first, so that folds come out alike; ties stay shuffled
    folds: list[list[int]] = [[] for _ in range(min(num_folds, len(order)))]
    for cluster in order:
        min(folds, key=len).extend(cluster)
    every = np.arange(len(clusters))
    made = [np.sort(np.array(fold, dtype=np.int64)) for fold in folds]
    return [Fold(np.setdiff1d(every, held, assume_unique=True), held) for held in made]
