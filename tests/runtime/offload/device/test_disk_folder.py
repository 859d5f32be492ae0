"""The folder of experts on disk beside a device: refused before a long load where it is of no use, and left with a complete file or nothing."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from windlass.core.launch import Launch
from windlass.core.layout import Layout
from windlass.core.place import place
from windlass.core.scheme import scheme
from windlass.core.tiers.demand import demand_of, planned_tensors
from windlass.core.tiers.device import DeviceNeeds, DevicePlan, ModelStage, device_limits, plan_device
from windlass.core.tiers.values import Speeds
from windlass.errors import BadInput, DoesNotFit
from windlass.model.families import rules
from windlass.model.families.registry import find, spec_of
from windlass.runtime.engine import tiers
from windlass.runtime.engine.tiers import RankWeights, placed_below
from windlass.runtime.nn.parallel.shard import WHOLE
from windlass.runtime.offload.device.share import library
from windlass.runtime.offload.device.weights import DeviceTieredWeights
from windlass.runtime.offload.placement import HostBudget
from windlass.runtime.offload.tiers import file
from windlass.units import GB, GIB

sys.path.insert(0, str(Path(__file__).parent))
from disk_tiers import SPLITS, Reference, Tiers, place_in, question, source

from subprocesses import started
from waiting import HUNG_SECONDS

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(library() is None, reason="no compiler")]


def plan_of(model: str, cap: int) -> tuple[ModelStage, DevicePlan]:
    known = find(model)
    assert known is not None
    spec = spec_of(known)
    stage, table, how = ModelStage(spec, (0, spec.num_layers)), rules(spec), scheme("int4")
    tensors = planned_tensors(table, spec, place(table, spec.num_layers, Layout(), how), Layout(), how, 0, stage.layers)
    return stage, plan_device(stage, demand_of(tensors, spec), cap, device_limits(stage, cap, DeviceNeeds()))


def below(model: str, cap: int, host: int, folder: Path, **more: Any) -> Any:
    stage, plan = plan_of(model, cap)
    weights = RankWeights(stage.spec, WHOLE, source(), 0, lambda: (), {"digest": "of this model"})
    launch = Launch(model=model, device="cuda", disk_folder=str(folder), **more)
    return placed_below(launch, weights, plan, HostBudget(host, 0, 0), launch.tiers[0] if launch.tiers else None)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """How much is free on the folder's disk, and how fast it is."""
    found = SimpleNamespace(free=10**12, speed=2.5e9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=found.free))
    monkeypatch.setattr(tiers, "disk_speed", lambda _: found.speed)
    return found


def test_what_fits_host_memory_stays_off_the_disk(tmp_path: Path, disk: Any) -> None:
    disk.free = 0
    plan, found = below("GLM-4.5-Air", 24 * GB, 100 * GB, tmp_path)
    assert found is None and not plan.split.on_disk


def test_a_folder_that_is_too_small_or_too_slow(tmp_path: Path, disk: Any) -> None:
    plan, found = below("GLM-4.5-Air", 24 * GB, 20 * GB, tmp_path)
    assert found.folder == tmp_path and found.keep and plan.split.on_disk > 0 and plan.host_bytes < 20 * GB - GIB
    disk.speed = 5e6
    with pytest.raises(BadInput, match=r"5 MB/s, so that a token would take \d+ s"):
        below("GLM-4.5-Air", 24 * GB, 20 * GB, tmp_path)
    disk.free = 5 * GB
    with pytest.raises(DoesNotFit, match="the disk has room for"):
        below("GLM-4.5-Air", 24 * GB, 20 * GB, tmp_path)
    with pytest.raises(BadInput, match="is not a folder"):
        below("GLM-4.5-Air", 24 * GB, 20 * GB, tmp_path / "missing")
    assert not list(tmp_path.iterdir())


def test_a_dense_model_is_refused_with_the_number(tmp_path: Path, disk: Any) -> None:
    del disk
    with pytest.raises(DoesNotFit, match=r"GiB short; raise --host-memory or --gpu-memory"):
        below("Llama-3.1-405B", 100 * GB, 20 * GB, tmp_path)


def test_a_plan_is_followed(tmp_path: Path, disk: Any) -> None:
    """Also where more host memory is free by now."""
    del disk
    made, _ = below("GLM-4.5-Air", 24 * GB, 30 * GB, tmp_path)
    planned = made.placed(Speeds(host=60e9, link=50e9, disk=2.5e9, device=4e12))
    again, found = below("GLM-4.5-Air", 24 * GB, 100 * GB, tmp_path, tiers=(planned,))
    assert again.split == made.split and found is not None
    with pytest.raises(DoesNotFit, match="the plan puts"):
        below("GLM-4.5-Air", 24 * GB, 20 * GB, tmp_path, tiers=(planned,))


def test_a_disk_that_fills_up_while_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and an empty folder."""
    written, write = [0], file.write_fully

    def filling(descriptor: int, content: memoryview, at: int) -> None:
        written[0] += len(content)
        if written[0] > 2**22:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(descriptor, content, at)

    monkeypatch.setattr(file, "write_fully", filling)
    weights = DeviceTieredWeights(source(), SPLITS[0], 1, place_in(tmp_path))
    with pytest.raises(DoesNotFit, match="disk full"):
        for layer in (1, 2, 3):
            weights.experts(layer, "gate", "up")
    weights.abort()
    assert not list(tmp_path.iterdir())


LOADING = """
import select, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from disk_tiers import SPLITS, place_in, source
from windlass.runtime.offload.device.weights import DeviceTieredWeights
def wait():  # looks up again and again: a signal that comes just before a read begins does not end it
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        pass
weights = DeviceTieredWeights(source(), SPLITS[0], 1, place_in(Path(sys.argv[2])))
for layer in (1, 2, 3):
    weights.experts(layer, "gate", "up")
    print("loaded", layer, flush=True)
    if layer == int(sys.argv[3]):
        wait()
tier = weights.finish()
print("complete" + (" and found" if weights.was_found else ""), flush=True)
wait()
"""


def loading(folder: Path, stop_after: int) -> AbstractContextManager[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LOADING, str(Path(__file__).parent), str(folder), str(stop_after)]
    return started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def lines_until(process: subprocess.Popen[str], wanted: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(wanted):
            return line.strip()
    raise AssertionError(f"ended before {wanted!r}")


@pytest.mark.multi
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_kill_leaves_nothing_but_a_complete_file(tmp_path: Path, how: signal.Signals) -> None:
    with loading(tmp_path, 2) as process:
        lines_until(process, "loaded 2")
        process.send_signal(how)
        process.wait(HUNG_SECONDS)
    assert not list(tmp_path.iterdir()), "killed while it was written"
    with loading(tmp_path, 0) as process:
        assert lines_until(process, "complete") == "complete"
        process.send_signal(how)
        process.wait(HUNG_SECONDS)
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".tier"
    tiers_again = Tiers(tmp_path, SPLITS[0])
    assert tiers_again.weights.was_found
    tiers_again.tier.close()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")
def test_a_folder_without_direct_reads() -> None:
    """tmpfs: the same, through the page cache."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=f"windlass-{os.getpid()}-") as folder:
        tiers_there, generator = Tiers(Path(folder), SPLITS[0]), torch.Generator().manual_seed(7)
        x, items = question(generator, tiers_there, 1, 8, 4)
        expected = Reference(SPLITS[0]).answer(1, x, items)
        assert (tiers_there.ask(1, x, items) - expected).norm() <= 3e-4 * expected.norm()
        tiers_there.tier.close()
