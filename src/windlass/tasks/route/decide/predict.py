"""A prompt to each model's chance of being right: the same arithmetic as when fitting, for one row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windlass.core.model import Frozen
from windlass.tasks.route.decide.router_file import RouterFile
from windlass.tasks.route.features.nearest import NUM_COLUMNS, likely
from windlass.tasks.route.features.ngrams import NUM_FEATURES, counted
from windlass.tasks.route.features.shape import expanded, shape_of
from windlass.tasks.route.features.sparse import MAX_COUNT, TERM


class Prediction(Frozen):
    chances: tuple[float, ...]
    """Of the models, in the router's order; a little below 0 or above 1 too, as the regression gives them."""
    novelty: float
    is_unlike: bool
    """The prompt is unlike the data: the router does not know, and abstains."""


@dataclass(frozen=True, slots=True)
class _Sources:
    centroids: NDArray[np.float32]
    means: NDArray[np.float64]
    share: float


class PromptPredictor:
    """Holds the arrays of a router, and nothing of any request."""

    def __init__(self, router: RouterFile) -> None:
        self.router = router
        columns = router.columns.array("<i8") % NUM_FEATURES
        self._rarity = np.zeros(NUM_FEATURES, dtype=np.float32)
        self._rarity[columns] = router.rarity.array()
        self._words = np.zeros((NUM_FEATURES, len(router.models)), dtype=np.float32)  # one prompt reads whole rows
        self._words[columns] = router.words.array().T
        self._shape = router.shape.array("<f8")
        self._bias = np.array(router.bias)
        self._mean, self._deviation = np.array(router.mean), np.array(router.deviation)
        self._sources: _Sources | None = None
        if router.centroids is not None and router.means is not None and router.share_of_sources:
            columns = np.ascontiguousarray(router.centroids.array().T)
            self._sources = _Sources(columns, router.means.array("<f8"), router.share_of_sources)

    def predict(self, text: str) -> Prediction:
        found = counted(text)
        features = np.fromiter(found.keys(), np.int64, len(found))
        amounts = TERM[np.minimum(np.fromiter(found.values(), np.int64, len(found)), MAX_COUNT)].astype(np.float64)
        rarity = self._rarity[features]
        novelty = float(amounts[rarity == 0].sum() / max(amounts.sum(), 1e-9))
        values = amounts * rarity
        values /= max(float(np.sqrt(values @ values)), 1e-12)
        shape = expanded(shape_of(text), self._mean, self._deviation)
        chances = self._bias + values @ self._words[features] + self._shape @ shape
        if self._sources is not None:
            chances = (1 - self._sources.share) * chances + self._sources.share * self._by_source(features, values, self._sources)
        unlike = not found or novelty > self.router.max_novelty
        return Prediction(chances=tuple(chances.tolist()), novelty=novelty, is_unlike=unlike)

    def _by_source(self, features: NDArray[np.int64], values: NDArray[np.float64], sources: _Sources) -> NDArray[np.float64]:
        is_word = features % 2 == 0
        mine = values[is_word]
        mine = mine / max(float(np.sqrt(mine @ mine)), 1e-12)
        cosines = mine @ sources.centroids[features[is_word] // 2 % NUM_COLUMNS]
        return likely(cosines.astype(np.float32)) @ sources.means
