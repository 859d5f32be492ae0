"""Checkpoints of a run: asynchronous, atomic, and loadable at any world size."""

from windlass.train.checkpoint.checkpoints import Checkpoints
from windlass.train.checkpoint.manifest import CheckpointIdentity, CheckpointManifest, spec_digest

__all__ = ["CheckpointIdentity", "CheckpointManifest", "Checkpoints", "spec_digest"]
