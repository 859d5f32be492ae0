"""Counter-based random numbers: a function of a request's seed and its number of samples, with no state.

So a request with a seed gives the same tokens alone, in a batch, and after a preemption.
"""

from __future__ import annotations

import secrets

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def fresh_seed() -> int:
    return secrets.randbits(64)


def uniform(seed: int, draw: int) -> float:
    """In [0, 1), 50 bits, so that its product with a double-precision sum stays below the sum."""
    return (_mixed((_mixed(seed & _MASK) + draw * _GOLDEN) & _MASK) >> 14) * 2.0**-50


def _mixed(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
