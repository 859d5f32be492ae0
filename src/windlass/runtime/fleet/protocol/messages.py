"""Messages between a root and a worker, after the handshake. Fixed types in msgpack; no torch.

A root joins, probes the machine, names the weights that an epoch needs, sends the pieces that the worker lacks, starts ranks and ends them.
Both send heartbeats every second. Ranks find each other through a key-value store that the root keeps.
"""

from __future__ import annotations

import msgspec

from windlass.core.hardware.spec import Device
from windlass.core.launch import RankJob
from windlass.runtime.engine.ranks.messages import RankHeartbeat
from windlass.runtime.weights.tensors.slices import Slice
from windlass.runtime.weights.transfer.pieces import Catalogue, CheckpointPiece


class FleetMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# --- both ways


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    heartbeat: RankHeartbeat


class Heartbeat(FleetMessage, frozen=True):
    """Every second. A worker includes the counters of its ranks."""

    ranks: list[RankReport] = []


class Goodbye(FleetMessage, frozen=True):
    """The last message of an orderly shutdown."""

    reason: str = ""


# --- from the root


class Join(FleetMessage, frozen=True):
    """The first message. A worker has one root at a time; a root that reconnects replaces its old connection."""

    root: bytes
    """Random ID of this root process."""
    name: str
    """Host name, for logs."""


class ProbeRequest(FleetMessage, frozen=True):
    pass


class PrepareWeights(FleetMessage, frozen=True):
    """The weights that a worker must have before the epoch can start."""

    epoch: int
    catalogue: Catalogue
    fingerprint: str
    """Of the contents; a local checkpoint with the same fingerprint is read instead."""
    path: str
    """Of the checkpoint on the root; looked at first."""
    slices: list[Slice]
    """For all ranks of this worker."""


class PieceData(FleetMessage, frozen=True):
    epoch: int
    piece: CheckpointPiece


class PiecesEnd(FleetMessage, frozen=True):
    """All requested pieces have been sent."""

    epoch: int


class PiecesFailed(FleetMessage, frozen=True):
    """The root cannot read a requested piece."""

    epoch: int
    reason: str


def key_name(epoch: int) -> str:
    """The name under which an epoch's key is masked (MessageChannel.mask_key)."""
    return f"key of epoch {epoch}"


class StartRanks(FleetMessage, frozen=True):
    """One process per job. The worker fills in the path of its weights and its device."""

    epoch: int
    jobs: list[RankJob]


class EndEpoch(FleetMessage, frozen=True):
    epoch: int


class EpochKeyFound(FleetMessage, frozen=True):
    """Reply to TakeEpochKey."""

    id: int
    value: bytes


class EpochKeyMissing(FleetMessage, frozen=True):
    id: int
    reason: str


class HeartbeatsRequest(FleetMessage, frozen=True):
    """Asks for fresh heartbeats of all ranks."""

    id: int


# --- from a worker


class Joined(FleetMessage, frozen=True):
    name: str
    """Of its machine."""


class WorkerBusy(FleetMessage, frozen=True):
    """The last message: another root uses this worker."""

    reason: str


class ProbeAnswer(FleetMessage, frozen=True):
    name: str
    address: str
    """Where other ranks reach its ranks: the address of --interface, else the one the root connected to."""
    num_cores: int
    free_bytes: int
    """Of RAM."""
    bandwidth: float
    """Measured memory read bandwidth in bytes per second; 0: unknown."""
    device: str
    """`cpu` or `cuda`: what its ranks run on."""
    gpus: tuple[Device, ...] = ()


class PiecesRequest(FleetMessage, frozen=True):
    """All missing slices, once; pieces are then sent without acknowledgement until PiecesEnd."""

    epoch: int
    slices: list[Slice]


class TransferProgress(FleetMessage, frozen=True):
    """Of receiving weights, or of a rank loading them."""

    epoch: int
    done_bytes: int
    total_bytes: int
    rank: int = -1
    """-1: receiving, not loading."""


class WeightsPrepared(FleetMessage, frozen=True):
    epoch: int
    held_bytes: int = 0
    received_bytes: int = 0


class PrepareFailed(FleetMessage, frozen=True):
    """The worker cannot get the weights of an epoch."""

    epoch: int
    reason: str


class RanksStarted(FleetMessage, frozen=True):
    """The processes run; each sends RankReady when it is loaded."""

    epoch: int
    pids: list[int]


class RankReady(FleetMessage, frozen=True):
    epoch: int
    rank: int
    weights_bytes: int = 0


class RankEnded(FleetMessage, frozen=True):
    """A rank exited although its epoch was not ended."""

    epoch: int
    rank: int
    kind: str
    """A class of windlass.errors (a user error), `GroupLost` (another rank is to blame), `Stuck`, or empty (a crash)."""
    reason: str
    short_bytes: int = 0


class EpochEnded(FleetMessage, frozen=True):
    """Reply to EndEpoch: no process of it is left."""

    epoch: int


class PutEpochKey(FleetMessage, frozen=True):
    epoch: int
    key: str
    value: bytes


class TakeEpochKey(FleetMessage, frozen=True):
    epoch: int
    id: int
    key: str
    timeout_seconds: float


class Heartbeats(FleetMessage, frozen=True):
    """Reply to HeartbeatsRequest."""

    id: int
    ranks: list[RankReport]


FromRoot = (
    Join
    | Heartbeat
    | ProbeRequest
    | PrepareWeights
    | PieceData
    | PiecesEnd
    | PiecesFailed
    | StartRanks
    | EndEpoch
    | EpochKeyFound
    | EpochKeyMissing
    | HeartbeatsRequest
    | Goodbye
)
FromWorker = (
    Joined
    | WorkerBusy
    | Heartbeat
    | ProbeAnswer
    | PiecesRequest
    | TransferProgress
    | WeightsPrepared
    | PrepareFailed
    | RanksStarted
    | RankReady
    | RankEnded
    | EpochEnded
    | PutEpochKey
    | TakeEpochKey
    | Heartbeats
    | Goodbye
)
