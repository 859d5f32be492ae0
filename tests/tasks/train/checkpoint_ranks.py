"""Ranks that save and load a made-up state, as processes of their own; and the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import CONTEXT

from waiting import HUNG_SECONDS

ROWS, COLUMNS = 10, 6


def exit_codes(count: int, work: Callable[..., None], *given: Any) -> list[int | None]:
    """work(rank, count, *given) of every rank, None where it hung; none is left behind."""
    ranks = [CONTEXT.Process(target=work, args=(rank, count, *given), daemon=True) for rank in range(count)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(HUNG_SECONDS)
    found = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return found


def join(rank: int, count: int, folder: Path) -> Any:
    """A mesh of all ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / f"store-{count}"), count), rank=rank, world_size=count)
    return init_device_mesh("cpu", (count,))


def whole_matrix() -> Any:
    import torch

    return torch.arange(ROWS * COLUMNS, dtype=torch.float64).reshape(ROWS, COLUMNS)


def state(mesh: Any, rank: int, scale: float) -> dict[str, Any]:
    """A matrix cut over all ranks by rows, one by columns, a vector that all have, progress, and each rank's own numbers."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = whole_matrix() * scale
    return {
        "model": {
            "rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "columns": distribute_tensor(whole + 0.5, mesh, [Shard(1)]),
            "vector": torch.full((3,), scale),
        },
        "progress": {"step": int(scale), "skipped": [[1, 2]] if scale else []},
        "rng": {str(rank): torch.full((2,), rank + 100 * scale)},
    }


def save(rank: int, count: int, folder: str, local: str = "") -> None:
    from windlass.tasks.train.checkpoint import CheckpointIdentity, Checkpoints

    base = Path(folder)
    mesh = join(rank, count, base)
    held = state(mesh, rank, 3.0)
    assert held["model"]["rows"].to_local().shape[0] == len(
        range(ROWS)[rank * -(-ROWS // count) : (rank + 1) * -(-ROWS // count)]
    )
    where = Path(local) / str(rank) if local else None  # as if each rank had a disk of its own
    checkpoints = Checkpoints(base / "run", CheckpointIdentity(model="made up", spec="1"), local=where)
    checkpoints.save(3, held)
    held["model"]["rows"].to_local().zero_()  # training goes on while it is written
    checkpoints.wait()
    checkpoints.close()


def load(rank: int, count: int, folder: str) -> None:
    import torch

    from windlass.tasks.train.checkpoint import CheckpointIdentity, Checkpoints

    base = Path(folder)
    mesh = join(rank, count, base)
    held = state(mesh, rank, 0.0)
    own = held["rng"][str(rank)].clone()
    checkpoints = Checkpoints(base / "run", CheckpointIdentity(model="made up", spec="1"))
    manifest_ranks = int((base / "saved_by").read_text())
    assert checkpoints.load(held) == 3
    whole = whole_matrix() * 3.0
    assert torch.equal(held["model"]["rows"].full_tensor(), whole)
    assert torch.equal(held["model"]["columns"].full_tensor(), whole + 0.5)
    assert torch.equal(held["model"]["vector"], torch.full((3,), 3.0))
    assert held["progress"] == {"step": 3, "skipped": [[1, 2]]}
    assert torch.equal(held["rng"][str(rank)], torch.full((2,), rank + 300.0) if rank < manifest_ranks else own)
    checkpoints.close()


def fill_one_disk(rank: int, count: int, folder: str) -> None:
    """The second rank's disk is full: both hear of it, nothing is left, and the next save succeeds."""
    import errno

    from windlass.tasks.train.checkpoint import CheckpointIdentity, Checkpoints
    from windlass.tasks.train.checkpoint.storage import CheckedWriter

    base = Path(folder)
    mesh = join(rank, count, base)
    said: list[str] = []
    checkpoints = Checkpoints(base / "run", CheckpointIdentity(model="made up", spec="1"), notify=said.append)
    whole = CheckedWriter.write_data

    def full(*given: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", "part")

    if rank == 1:
        CheckedWriter.write_data = full  # type: ignore[method-assign]
    checkpoints.save(1, state(mesh, rank, 1.0), wait=True)
    assert checkpoints.num_failed == 1 and checkpoints.steps() == []
    if rank == 0:
        assert len(said) == 1 and "training continues: No space left" in said[0], said
        assert not list((base / "run").glob("step-*"))
    CheckedWriter.write_data = whole  # type: ignore[method-assign]
    checkpoints.save(2, state(mesh, rank, 2.0), wait=True)
    assert checkpoints.steps() == [2]
    checkpoints.close()


def save_out_of_reach(rank: int, count: int, folder: str, local: str) -> None:
    """The shared folder cannot be written: what is on local disks stays, the last of it."""
    from windlass.tasks.train.checkpoint import CheckpointIdentity, Checkpoints, gathering

    base = Path(folder)
    mesh = join(rank, count, base)
    said: list[str] = []
    checkpoints = Checkpoints(
        base / "run", CheckpointIdentity(model="made up", spec="1"), local=Path(local) / str(rank), notify=said.append
    )

    def gone(*given: Any) -> None:
        raise OSError(5, "Input/output error")

    checkpoints_module = __import__("windlass.tasks.train.checkpoint.checkpoints", fromlist=["copy_to_shared"])
    assert checkpoints_module.copy_to_shared is gathering.copy_to_shared
    checkpoints_module.copy_to_shared = gone
    for step in (2, 3):
        checkpoints.save(step, state(mesh, rank, float(step)), wait=True)
    assert checkpoints.num_failed == 2 and checkpoints.steps() == []
    left = sorted(path.name for path in (Path(local) / str(rank)).iterdir())
    assert left == ["step-00000003.tmp"], left
    checkpoints.close()
