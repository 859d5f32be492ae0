"""Numbers that every implementation of an operation must agree on."""

from __future__ import annotations

CLAMPED_SWIGLU_SLOPE = 1.702
"""As in gpt-oss: sigmoid(1.702 x) x approximates GELU (arXiv 1606.08415, section 2)."""
ROUTER_EPSILON = 1e-20
"""Added to the sum of a token's scores before dividing by it, as the published code of sigmoid routers does."""
