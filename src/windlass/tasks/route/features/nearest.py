"""Which of several centroids a text is likely of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_COLUMNS = 16384
"""Words (no pairs) are folded into so many columns: a centroid is 64 kB."""
SHARPNESS = 30.0
"""Of the softmax over cosines: a lead of 0.1 is 20 times as likely."""


def likely(cosines: NDArray[np.float32]) -> NDArray[np.float64]:
    """How likely each source is, by row."""
    raised = np.exp(SHARPNESS * (cosines - cosines.max(axis=-1, keepdims=True)).astype(np.float64))
    return raised / raised.sum(axis=-1, keepdims=True)
