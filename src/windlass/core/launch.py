"""How a model is opened: one value from the command line (or `windlass.Client`) to every rank. Values only.

A new option is a field of `Launch` and a row in cli/options.py. Each rank gets a `RankJob`: the Launch, its rank number and
what it needs to find the other ranks.
"""

from __future__ import annotations

from typing import Any

from windlass.core.layout import Layout
from windlass.core.model import Frozen
from windlass.core.place import Interval
from windlass.core.ranks.epoch import EpochPlan
from windlass.core.ranks.rendezvous import EXACT, SYNCS, Meeting
from windlass.core.scheme import SCHEME_NAMES
from windlass.core.tiers.values import TierPlacement
from windlass.errors import BadInput, Impossible, UnknownName
from windlass.units import MIB, format_bytes

DEVICES = ("auto", "cpu", "cuda", "mps")
KV_TYPES = ("bf16", "fp8", "fp32")
LOAD_SCHEMES = ("int4", "int8")
SPECULATE = ("auto", "off", "ngram", "mtp")
"""Or a model that drafts."""
LEAST_MEMORY = 256 * MIB
"""A process with torch takes about as much before any weight is loaded."""
LOADER = "windlass.runtime.engine.ranks.first:load_job"


class RandomInit(Frozen):
    """Random weights of a given shape; no checkpoint is read."""

    config: dict[str, Any]
    """The contents of a config.json."""
    scheme: str = "int4"
    group: int | None = None
    seed: int = 0


class Launch(Frozen):
    """What to load and how. A field that is None is chosen by the engine from the memory there is."""

    model: str = ""
    """A path: a directory, a .gguf or a .m file."""
    device: str = "auto"
    kv: str | None = None
    """bf16, fp8 or fp32; None: bf16."""
    exact: bool = False
    """Dequantize packed weights to fp32 at load: slower and larger, without 8-bit activation rounding."""
    deterministic: bool = False
    """A request's tokens do not depend on what else runs. Promised on CPUs alone."""
    context_tokens: int | None = None
    max_sequences: int | None = None
    """Sequences in one batch."""
    kv_bytes: int | None = None
    """Size of the KV cache."""
    max_step_tokens: int | None = None
    num_tokens: int | None = None
    """Vocabulary size of the tokenizer; None: that of the model's head."""
    random_weights: RandomInit | None = None
    layout: Layout = Layout()
    """Degrees of parallelism."""
    workers: tuple[str, ...] = ()
    """HOST:PORT of every machine that shares the model with this one."""
    secret_file: str | None = None
    """A path; what is in it is read by the root alone."""
    sync: str = EXACT
    """How partial sums travel between ranks: exact or int8."""
    gpu_memory: tuple[int, ...] = ()
    """Bytes of each device that may be used; the last one counts for all that follow. Empty: what is free."""
    host_memory: int | None = None
    """Bytes of host memory that the ranks of a machine may use, all in all; None: what is free."""
    disk_folder: str | None = None
    """Where weights that do not fit into memory are kept; None: they are removed with the process."""
    quant: str | None = None
    """Quantize a checkpoint while loading (int4 or int8), or how to store random weights; None: as stored."""
    tiers: tuple[TierPlacement, ...] = ()
    """Placement of each rank's weights from a saved plan; empty: chosen while loading."""
    speculate: str = "off"
    """How tokens are drafted: one of SPECULATE, or the path of a small model with the same tokens."""
    planned: EpochPlan | None = None
    """Placement from a saved plan, used while as many machines are there as it was made for."""
    adapters: tuple[tuple[str, str], ...] = ()
    """LoRA adapters that requests may name: names, and the folders that they are in."""
    loader: str = LOADER
    """module:function that makes the engine: (RankJob, progress) -> (Engine, Info)."""

    @property
    def kv_type(self) -> str:
        return self.kv or "bf16"

    @property
    def draft_model(self) -> str:
        """Of speculation; empty: none."""
        return "" if self.speculate in SPECULATE else self.speculate

    @property
    def is_single(self) -> bool:
        """One rank on this machine."""
        return not self.workers and self.layout.world == 1

    @property
    def ranks_per_machine(self) -> int:
        return max(self.layout.world // (len(self.workers) + 1), 1)


def check_launch(launch: Launch) -> None:
    """Refuses options that contradict each other, before anything is loaded."""
    if launch.device.split(":")[0] not in DEVICES:
        raise BadInput(f"--device is cpu, cuda (an NVIDIA or AMD GPU) or mps (Apple), not {launch.device!r}")
    if launch.kv not in (None, *KV_TYPES):
        raise BadInput(f"--kv is {', '.join(KV_TYPES[:-1])} or {KV_TYPES[-1]}, not {launch.kv!r}")
    if launch.context_tokens is not None and launch.context_tokens < 2:
        raise BadInput("--context must be at least 2 tokens: one for the prompt and one for the answer")
    _check_memory(launch)
    _check_layout(launch)
    _check_deterministic(launch)
    if not launch.is_single and (launch.speculate == "mtp" or launch.draft_model):
        raise BadInput(
            f"--speculate {launch.speculate} needs the whole model on one device; choose ngram, or do not split the model"
        )
    if launch.workers:
        _check_workers(launch)
    elif launch.secret_file is not None:
        raise BadInput("--secret-file needs --workers; add them, or leave it out")


def _check_memory(launch: Launch) -> None:
    if launch.quant not in (None, *SCHEME_NAMES):
        raise UnknownName("quantization", launch.quant or "", SCHEME_NAMES)
    if launch.quant is not None and launch.exact:
        raise BadInput("--quant quantizes and --exact undoes it; leave one of them out")
    if launch.gpu_memory and launch.device == "cpu":
        raise BadInput("--gpu-memory has no effect with --device cpu; leave it out")
    sizes = [("--host-memory", launch.host_memory), *(("--gpu-memory", size) for size in launch.gpu_memory)]
    for name, size in sizes:
        if size is not None and size < LEAST_MEMORY:
            raise BadInput(
                f"{name} {format_bytes(size)} is too little to run anything; give at least {format_bytes(LEAST_MEMORY)}"
            )


def check_quant(launch: Launch) -> None:
    """Of a checkpoint that is quantized while it loads."""
    if launch.quant not in (None, *LOAD_SCHEMES):
        raise BadInput(
            f"--quant {launch.quant}: a checkpoint is quantized to {' or '.join(LOAD_SCHEMES)} while it loads; `windlass convert` has more"
        )


def _check_layout(launch: Launch) -> None:
    layout = launch.layout
    if layout.ep > layout.tp or layout.tp % layout.ep:
        raise BadInput(f"--ep {layout.ep} must divide --tp {layout.tp}: experts are spread over the tensor-parallel ranks")
    if launch.sync not in SYNCS:
        raise BadInput(f"--sync is {' or '.join(SYNCS)}, not {launch.sync!r}")
    if launch.sync != EXACT and launch.is_single:
        raise BadInput(f"--sync {launch.sync} is for several ranks; add --workers or --tp")


def _check_deterministic(launch: Launch) -> None:
    if not launch.deterministic:
        return
    if launch.device not in ("auto", "cpu"):
        raise not_deterministic_on(launch.device)
    if launch.sync != EXACT:
        raise BadInput(
            f"--deterministic needs exact sums between ranks: --sync {launch.sync} rounds them in blocks that requests share; leave one out"
        )


def not_deterministic_on(device: str) -> Impossible:
    return Impossible(
        f"--deterministic is promised on CPUs alone, not on {device}, whose kernels add in another order for another number of rows; "
        "add --device cpu, or leave it out"
    )


def _check_workers(launch: Launch) -> None:
    if launch.secret_file is None:
        raise BadInput("--workers needs --secret-file FILE, the one that the workers were started with")
    machines, ranks = len(launch.workers) + 1, launch.layout.world
    if ranks > machines and ranks % machines:
        raise BadInput(
            f"{ranks} ranks ({launch.layout}) cannot be divided evenly over {machines} machines, this one included; "
            f"choose as many ranks as machines, or a multiple"
        )


class RankJob(Frozen):
    """Everything one rank gets."""

    launch: Launch
    rank: int = 0
    meeting: Meeting | None = None
    """How the ranks of this epoch find each other; None: there is only this one."""
    epoch: int = 0
    shares: tuple[float, ...] = ()
    """Share of the work by tp index; empty: equal."""
    stages: tuple[Interval, ...] = ()
    """Layers of each pp index; empty: as equal as possible."""
    slices_folder: str = ""
    """A folder of received weight slices; empty: `launch.model` is read."""
    supervisor_fd: int = -1
    """Rank 0: the file descriptor of its socket to the fleet."""
    is_inline: bool = False
    """Rank 0 runs inside the caller's process, which outlives the epoch."""
