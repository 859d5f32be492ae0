"""Experts of the next layer that are guessed beside a device: how many. Pure; planner and engine share it.

While the device computes attention, routers and the experts that it has, link and CPU would have nothing to read: which experts of host memory a
layer needs is known only after its router. The next layer's router, applied to what enters this layer's experts, names most of them
(docs/reference/offload.md). Both then read in that time too. What was guessed wrongly is left off as soon as that is known. What that saves of a
step: core/tiers/exchange.py.
"""

from __future__ import annotations

MAX_GUESSES = 16
"""Experts of a layer (sources/offload.cu, native/tiles/mailbox.h)."""
GUESS_ROWS = 4
"""Of a step. With eight nothing was gained: 50.8 tokens/s with guesses and 51.3 without, means of four rounds on two machines (GLM-4.6). The kernels
of more rows need all registers of a multiprocessor, so that none would be left for those that fetch."""
CARRIED_BYTES = 12_500_000
"""What a link of 50 GB/s carries in the 250 us that a layer of some rows does not read: more experts would only take longer, since few
multiprocessors fetch."""
GUESSED_RIGHT = 0.74
"""Of the experts that a layer needs, for predictions: a trained mixture's (tiny-glm, 480 tokens), as models that are planned for are trained. Random
weights, with which speeds are measured, have 0.93; large trained mixtures were not tried."""


def ahead_slots(in_host: int) -> int:
    """Slots for experts that are fetched ahead, of each of two layers: in the second half of the staging slots, idle in steps of few rows."""
    return min(MAX_GUESSES, in_host // 2)


def most_guesses(rows: int, in_host: int, fetched_bytes: int) -> int:
    """Of a layer with so many experts in host memory. `fetched_bytes`: the device's part of one of them."""
    if rows > GUESS_ROWS:
        return 0
    slots = ahead_slots(in_host)
    return slots if rows == 1 or not fetched_bytes else min(slots, -(-CARRIED_BYTES // fetched_bytes))
