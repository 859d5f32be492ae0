"""What one rank may use of its machine, and where its weights go. The decision itself is pure (core/tiers/placement.py)."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import NamedTuple

from windlass.core.launch import Launch
from windlass.core.model import ModelSpec
from windlass.core.tiers.below import RoomBelow
from windlass.core.tiers.budget import LOADING_BYTES
from windlass.core.tiers.demand import HeldTensor, demand_of
from windlass.core.tiers.placement import place_tiers
from windlass.core.tiers.values import Demand, Room, Speeds, TierPlacement
from windlass.errors import BadInput, DoesNotFit
from windlass.model.formats.disk.atomic import require_free
from windlass.runtime.kernels.program import program
from windlass.runtime.machine.bandwidth import read_bandwidth
from windlass.runtime.machine.folders import cache_dir
from windlass.runtime.machine.memory import process_memory
from windlass.runtime.machine.system import System, this_system
from windlass.runtime.offload.tiers.file import clear_leftovers, tier_path, written_entries
from windlass.runtime.offload.tiers.speed import check_speed, disk_speed
from windlass.units import format_bytes

DISK_SHARE = 0.95
"""Of the free space of a disk."""
ASSUMED_BANDWIDTH = 10e9
"""Of host memory, where it cannot be measured."""


class TierFolder(NamedTuple):
    path: Path
    keep: bool
    """The file stays, to be found by the next start."""
    key: str = ""
    """Of the file."""

    @property
    def written_bytes(self) -> int:
        """Of the file of an earlier run, which is used again or replaced."""
        try:
            return tier_path(self.path, self.key).stat().st_size if self.keep else 0
        except OSError:
            return 0


class HostBudget(NamedTuple):
    """Host memory of one rank."""

    cap_bytes: int
    """What the process may use in all."""
    used_bytes: int
    """By the process already."""
    reserved_bytes: int
    """KV cache and activations."""

    @property
    def weight_bytes(self) -> int:
        return self.cap_bytes - self.used_bytes - self.reserved_bytes - LOADING_BYTES


def host_budget(launch: Launch, reserved_bytes: int, system: System | None = None) -> HostBudget:
    """What is free, and at most --host-memory; shared by the ranks of a machine."""
    gc.collect()  # a model that was closed may be in cycles with its tensors: gigabytes that would count as used
    used = process_memory()
    resident = used.anonymous_bytes + used.file_bytes
    cap = (system or this_system()).ram_bytes // launch.ranks_per_machine + resident
    if launch.host_memory is not None:
        cap = min(cap, launch.host_memory // launch.ranks_per_machine)
    return HostBudget(cap, resident, reserved_bytes)


def place_rank(demand: Demand, budget: HostBudget, folder: TierFolder, speeds: Speeds, sharing: int = 1) -> TierPlacement:
    """The fastest placement that fits. Raises before anything long begins where there is none, or where the disk is too slow for it.

    `sharing`: ranks that write to the same disk.
    """
    free = _free_disk(folder, sharing)
    written = written_entries(folder.path, folder.key) if folder.keep else ()
    try:
        placed = place_tiers(demand, Room(host=max(budget.weight_bytes, 0), disk=free), speeds, written)
    except DoesNotFit as error:
        raise DoesNotFit(
            f"{error} (of {format_bytes(budget.cap_bytes)} of host memory the process uses {format_bytes(budget.used_bytes)}, "
            f"KV cache and activations need {format_bytes(budget.reserved_bytes)})",
            error.short_bytes,
        ) from None
    check_speed(folder.path, speeds.disk, _step_bytes(demand, placed))
    return placed


def planned_rank(tiers: tuple[TierPlacement, ...], rank: int, demand: Demand, budget: HostBudget) -> TierPlacement:
    """A rank's part of a plan, which must fit this model and the memory that is there."""
    placed = tiers[min(rank, len(tiers) - 1)]
    unknown = {*placed.disk_units, *placed.host_units} - {unit.name for unit in demand.units}
    if unknown or (placed.disk_experts and demand.experts is None):
        raise BadInput(f"the plan places {min(unknown, default='experts')}, which this model does not have; plan again")
    if placed.device_bytes:
        raise BadInput("the plan is for a GPU beside host memory, and this is a CPU; plan for CPUs")
    short = placed.host_bytes - budget.weight_bytes
    if short > 0:
        raise DoesNotFit(
            f"the plan puts {format_bytes(placed.host_bytes)} of weights into host memory, and {format_bytes(max(budget.weight_bytes, 0))} are "
            f"left for them: {format_bytes(short)} short; plan again with a smaller --host-memory",
            short,
        )
    return placed


def measured_speeds(folder: Path) -> Speeds:
    system = this_system()
    memory = read_bandwidth(program.num_threads(), system.boot_id) or ASSUMED_BANDWIDTH
    return Speeds(host=memory, disk=disk_speed(folder))


def tier_folder(launch: Launch, key: str) -> TierFolder:
    """The given folder, where files are kept; else one in the cache, where they have no name and vanish with the process."""
    if launch.disk_folder is None:
        path = cache_dir() / "offload"
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(
                f"what does not fit into memory is kept in a file, and {path} cannot be created ({error.strerror}); "
                "name a folder on a fast local disk with --disk-folder"
            ) from None
        clear_leftovers(path)
        return TierFolder(path, keep=False, key=key)
    path = Path(launch.disk_folder)
    if not path.is_dir():
        raise BadInput(f"--disk-folder {path} is not a folder; create it, or name one on a fast local disk")
    clear_leftovers(path)
    return TierFolder(path, keep=True, key=key)


def room_below(budget: HostBudget, folder: TierFolder | None, written: int = 0, sharing: int = 1) -> RoomBelow:
    """Of a device. `folder` None: nothing goes to disk. `written`: experts of each layer in the file of an earlier run; `sharing`: ranks that write
    to the same disk."""
    host = max(budget.weight_bytes, 0)
    return RoomBelow(host) if folder is None else RoomBelow(host, _free_disk(folder, sharing), written)


def _free_disk(folder: TierFolder, sharing: int) -> int:
    return int(shutil.disk_usage(folder.path).free * DISK_SHARE) // sharing + folder.written_bytes


def check_space(folder: TierFolder, placed: TierPlacement) -> None:
    require_free(folder.path, placed.disk_bytes - folder.written_bytes)


def _step_bytes(demand: Demand, placed: TierPlacement) -> int:
    """What a decode step reads from disk, at most."""
    sizes = {unit.name: unit.num_bytes for unit in demand.units}
    experts = demand.experts.touched * placed.disk_experts * placed.expert_bytes if demand.experts else 0
    return sum(sizes[name] for name in placed.disk_units) + int(experts)


def describe_tiers(placed: TierPlacement) -> str:
    """One line for the user."""
    parts = [f"{format_bytes(placed.host_bytes)} of weights in memory"]
    if placed.disk_experts:
        parts.append(f"{placed.disk_experts:,} experts on disk, {placed.host_slots:,} at a time in memory")
    if placed.disk_units:
        parts.append(f"{len(placed.disk_units):,} matrices streamed from disk every step")
    return f"{', '.join(parts)} ({format_bytes(placed.disk_bytes)} on disk)"


def rank_demand(tensors: list[HeldTensor], spec: ModelSpec, launch: Launch) -> Demand:
    return demand_of(tensors, spec, batch=1.0 if launch.max_sequences is None else float(launch.max_sequences))
