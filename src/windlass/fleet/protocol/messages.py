"""What a root and a worker say to each other once each has proved that it knows the secret. Fixed types, msgpack, no code; no torch.

A root joins, asks what there is, says what an epoch needs, answers with the parts that are not there, starts ranks and ends them. Between
it all both say every second that they are alive. Ranks find each other by notes, which the root keeps.
"""

from __future__ import annotations

import msgspec

from windlass.core.hardware.spec import Device
from windlass.core.launch import RankJob
from windlass.engine.ranks.messages import RankHeartbeat
from windlass.weights.tensors.slices import Slice
from windlass.weights.transfer.pieces import Catalogue, Piece


class FleetMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# --- both ways


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    heartbeat: RankHeartbeat


class Heartbeat(FleetMessage, frozen=True):
    """Every second. A worker tells what its ranks have done so far."""

    ranks: list[RankReport] = []


class Goodbye(FleetMessage, frozen=True):
    """Nothing more will be said; not an accident."""

    reason: str = ""


# --- from the root


class Join(FleetMessage, frozen=True):
    """The first message. A worker has one root at a time; one that comes back replaces itself."""

    root: bytes
    """Random, of this life of the root."""
    name: str
    """Of its machine, for people to read."""


class ProbeRequest(FleetMessage, frozen=True):
    pass


class PrepareWeights(FleetMessage, frozen=True):
    """What a worker must have before the epoch can start."""

    epoch: int
    catalogue: Catalogue
    fingerprint: str
    """Of the contents: a worker's own files with the same are read instead."""
    path: str
    """Of the checkpoint at the root; where it is the same here, it is read."""
    slices: list[Slice]
    """Of all ranks of this worker."""


class PieceData(FleetMessage, frozen=True):
    epoch: int
    piece: Piece


class PiecesEnd(FleetMessage, frozen=True):
    """All that was wanted has been sent."""

    epoch: int


class PiecesFailed(FleetMessage, frozen=True):
    """What was wanted cannot be read; the reason say why."""

    epoch: int
    reason: str


def key_name(epoch: int) -> str:
    """Under which an epoch's key is mask_key (channel.Wire)."""
    return f"key of epoch {epoch}"


class StartRanks(FleetMessage, frozen=True):
    """One process a job, after Prepare where there is something to read. What the worker holds, and where, it fills in itself."""

    epoch: int
    jobs: list[RankJob]


class EndEpoch(FleetMessage, frozen=True):
    epoch: int


class EpochKeyFound(FleetMessage, frozen=True):
    """To TakeNote."""

    id: int
    value: bytes


class EpochKeyMissing(FleetMessage, frozen=True):
    id: int
    reason: str


class HeartbeatsRequest(FleetMessage, frozen=True):
    """A heartbeat of every rank, now."""

    id: int


# --- from a worker


class Joined(FleetMessage, frozen=True):
    name: str
    """Of its machine."""


class WorkerBusy(FleetMessage, frozen=True):
    """The last message: another root has this worker."""

    reason: str


class ProbeAnswer(FleetMessage, frozen=True):
    name: str
    address: str
    """Where other ranks reach its ranks: of the named interface, else the one that the root came to."""
    num_cores: int
    free_bytes: int
    """Of RAM."""
    bandwidth: float
    """Bytes per second that memory is read at, measured; 0 where it could not be."""
    device: str
    """`cpu`, `cuda`..., what its ranks run on."""
    gpus: tuple[Device, ...] = ()


class PiecesRequest(FleetMessage, frozen=True):
    """All that is missing, once; pieces come until there is nothing left of it, without an answer to each."""

    epoch: int
    slices: list[Slice]


class TransferProgress(FleetMessage, frozen=True):
    """Of what was missing, and of how much; also what is read from the disk when ranks load."""

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
    """An epoch cannot be prepared here; the reason say why."""

    epoch: int
    reason: str


class RanksStarted(FleetMessage, frozen=True):
    """Processes there are; each tells when it is ready."""

    epoch: int
    pids: list[int]


class RankReady(FleetMessage, frozen=True):
    epoch: int
    rank: int
    weights_bytes: int = 0


class RankEnded(FleetMessage, frozen=True):
    """Whatever the reason: a rank never ends by itself while its epoch is wanted."""

    epoch: int
    rank: int
    kind: str
    """A class of windlass.errors where it is the user's to mend, `GroupLost` where another rank is to blame, `Stuck`, else empty."""
    reason: str
    short_bytes: int = 0


class EpochEnded(FleetMessage, frozen=True):
    """To EndEpoch: no process of it is left."""

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
    """To HeartbeatsRequest."""

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
