"""Checkpoints of a run: saved aside, whole or not at all, and loaded at any world size."""

from windlass.train.checkpoint.checkpoints import Checkpoints
from windlass.train.checkpoint.manifest import Identity, Manifest, spec_digest

__all__ = ["Checkpoints", "Identity", "Manifest", "spec_digest"]
