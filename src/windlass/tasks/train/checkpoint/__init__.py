"""Checkpoints of a run: asynchronous, atomic, and loadable at any world size."""

from windlass.tasks.train.checkpoint.checkpoints import Checkpoints
from windlass.tasks.train.checkpoint.manifest import CheckpointIdentity, CheckpointManifest, spec_digest

__all__ = ["CheckpointIdentity", "CheckpointManifest", "Checkpoints", "spec_digest"]
