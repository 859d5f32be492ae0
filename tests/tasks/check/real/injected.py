"""Faults made for real on this machine, each inside a mount namespace or a cgroup of its own, and what `windlass check` then says.

GPUs are the exception: there is no way to break one, so a stand-in for NVML and for `dmesg` is put where Windlass looks for them.
Needs root. tests/tasks/check/real/test_faults.py and bench/check/faults.py share this list.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOREVER = 600
"""Seconds; only ends a hang."""

# A driver with two GPUs, in the state that `BROKEN` names.
NVML = """
import os
from types import SimpleNamespace
BROKEN = os.environ.get("BROKEN", "")
class NVMLError(Exception): pass
class NVMLError_NotSupported(NVMLError): pass
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 2
def nvmlSystemGetDriverVersion(): return "570.1"
def nvmlSystemGetCudaDriverVersion(): return 12080
def nvmlDeviceGetHandleByIndex(index):
    if BROKEN == "xid79" and index == 1: raise NVMLError("GPU is lost")
    return index
def nvmlDeviceGetName(handle): return "NVIDIA H200"
def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
def nvmlDeviceGetMemoryInfo(handle): return SimpleNamespace(total=141 << 30, free=140 << 30, used=1 << 30)
def nvmlDeviceGetCurrentClocksEventReasons(handle): return 0x40 if BROKEN == "hot" and handle == 1 else 0x1
def nvmlDeviceGetTemperature(handle, sensor): return 91 if BROKEN == "hot" and handle == 1 else 40
def nvmlDeviceGetTotalEccErrors(handle, kind, counter): return 3 if BROKEN == "ecc" and handle == 1 else 0
def _unsupported(*arguments): raise NVMLError_NotSupported("not supported")
def __getattr__(name):
    if name.startswith("nvml"): return _unsupported
    raise AttributeError(name)
"""
DMESG = """#!/bin/sh
[ "$BROKEN" = xid79 ] && echo '[ 812.4] NVRM: Xid (PCI:0000:5e:00): 79, pid=4711, GPU has fallen off the bus.'
exit 0
"""
# /dev with what programs need, and the file by which Windlass knows that there is a driver.
DRIVER = (
    'mkdir "$PLACE/dev" && mount -t tmpfs none "$PLACE/dev" && for n in null zero full random urandom tty; do touch "$PLACE/dev/$n"; '
    'mount --bind /dev/$n "$PLACE/dev/$n"; done; mkdir "$PLACE/dev/shm"; mount --bind /dev/shm "$PLACE/dev/shm"; '
    'touch "$PLACE/dev/nvidiactl"; mount --move "$PLACE/dev" /dev; '
)


@dataclass(frozen=True)
class Fault:
    name: str
    how: str
    """In words, for a table."""
    check: str
    """The check that must find it."""
    state: str
    says: tuple[str, ...]
    """What its row must say, in `measured` or `remedy`."""
    prepare: str = ""
    """Shell, in a mount namespace of its own; $PLACE is an empty folder."""
    words: tuple[str, ...] = ()
    """Of `windlass check`; {place} and {tests} are put in."""
    environment: dict[str, str] = field(default_factory=dict[str, str])

    def __str__(self) -> str:
        return self.name


IMAGE = 'truncate -s 64M "$PLACE/image" && mkfs.ext4 -q "$PLACE/image" && mkdir "$PLACE/disk" && mount -o loop "$PLACE/image" "$PLACE/disk" && '
FLIP = """python3 -c 'import sys; p = sys.argv[1]; d = bytearray(open(p, "rb").read()); d[-9] ^= 1; open(p, "wb").write(d)' """

BLKIO = f"/sys/fs/cgroup/blkio/windlass-check-{os.getpid()}"

FAULTS = (
    Fault(
        "a full disk", "ext4 in a loop device, filled by dd", "disk room", "fail", ("free in",),
        IMAGE + 'dd if=/dev/zero of="$PLACE/disk/fill" bs=64k 2>/dev/null || true',
        ("--folder", "{place}/disk"),
    ),
    Fault(
        "no inode left", "tmpfs with 20 inodes", "disk room", "fail", ("files may still be created",),
        'mkdir "$PLACE/disk" && mount -t tmpfs -o nr_inodes=20 none "$PLACE/disk"', ("--folder", "{place}/disk"),
    ),
    Fault(
        "a read-only disk", "mount -o remount,ro", "disk room", "fail", ("Read-only file system",),
        IMAGE + 'mount -o remount,ro "$PLACE/disk"', ("--folder", "{place}/disk"),
    ),
    Fault(
        "a slow disk", "blkio cgroup: 20 MB/s of writes", "disk speed", "warn", ("MB/s", "checkpoints will take long"),
        f'mkdir -p {BLKIO} && stat -c %d "$PLACE" | {{ read d; echo "$((d / 256)):$((d % 256)) 20000000"; }} '
        f"> {BLKIO}/blkio.throttle.write_bps_device && echo $$ > {BLKIO}/cgroup.procs", ("--full", "--folder", "{place}"),
    ),
    Fault(
        "no room in /dev/shm", "tmpfs of 1 MiB mounted there", "/dev/shm", "warn", ("1 MiB free of 1 MiB", "--shm-size"),
        "mount -t tmpfs -o size=1m none /dev/shm",
    ),
    Fault("few open files", "ulimit -n 256", "open files", "warn", ("256", "ulimit -n"), "ulimit -n 256"),
    Fault(
        "an NCCL variable that does not exist", "NCCL_TREE_THRESHOLD=0", "environment", "warn", ("NCCL_TREE_THRESHOLD=0", "removed in NCCL 2.5"),
        environment={"NCCL_TREE_THRESHOLD": "0"},
    ),
    Fault(
        "a misspelt NCCL variable", "NCCL_SOCKET_IFNAM=eth0", "environment", "warn", ("NCCL_SOCKET_IFNAM", "NCCL_SOCKET_IFNAME"),
        environment={"NCCL_SOCKET_IFNAM": "eth0"},
    ),
    Fault(
        "XID 79", "stand-in for NVML (GPU is lost) and dmesg", "xid", "fail", ("XID 79 of 0000:5e:00", "reboot"), DRIVER,
        environment={"BROKEN": "xid79"},
    ),
    Fault(
        "a lost GPU", "the same", "gpus", "fail", ("GPU is lost", "reboot"), DRIVER, environment={"BROKEN": "xid79"},
    ),
    Fault(
        "a GPU that is hot and throttled", "stand-in for NVML", "throttle", "warn", ("GPU 1", "thermal slowdown", "91 C"), DRIVER,
        environment={"BROKEN": "hot"},
    ),
    Fault(
        "uncorrected memory errors", "stand-in for NVML", "ecc", "fail", ("GPU 1: 3 uncorrected",), DRIVER, environment={"BROKEN": "ecc"},
    ),
    Fault(
        "a wrong digest", "one bit of a weight flipped beside SHA256SUMS", "model files", "fail", ("model.safetensors is damaged", "SHA-256"),
        'cp -r "$MODEL" "$PLACE/model" && (cd "$PLACE/model" && sha256sum *.safetensors > SHA256SUMS) && '
        + FLIP + '"$PLACE"/model/*.safetensors', ("{place}/model", "--full"),
    ),
    Fault(
        "a file that is cut off", "truncate by 100 bytes", "model files", "fail", ("safetensors",),
        'cp -r "$MODEL" "$PLACE/model" && truncate -s -100 "$PLACE"/model/*.safetensors', ("{place}/model",),
    ),
    Fault(
        "a corrupt shard", "one byte of a token shard changed", "data", "fail", ("damaged",),
        f'python3 "{HERE}/make_recipe.py" "$PLACE" && cd "$PLACE" && ' + FLIP + 'out/tiny-cpu/tasks/train-00000.tokens.bin',
        ("recipes/tiny-glm-moe-cpu.toml", "--full"),
    ),
    Fault(
        "monitoring that does not answer", "a port nobody listens on", "monitoring", "fail", ("refused",),
        words=("--monitor", "http://127.0.0.1:1/"),
    ),
)  # fmt: skip


def missing() -> str:
    if os.geteuid() != 0:
        return "mount namespaces need root"
    lacking = [name for name in ("unshare", "mkfs.ext4", "mount") if shutil.which(name) is None]
    return f"{', '.join(lacking)} not installed" if lacking else ""


def report(fault: Fault | None, place: Path) -> dict[str, Any]:
    """What `windlass check --json` says with the fault; without one, of the same machine in the same harness."""
    from windlass.model.bundled.models import find_bundled

    (place / "pynvml.py").write_text(NVML)
    (place / "dmesg").write_text(DMESG)
    (place / "dmesg").chmod(0o755)
    prepare, words, changes = ("", (), {}) if fault is None else (fault.prepare, fault.words, fault.environment)
    environment = os.environ | {
        "PLACE": str(place),
        "MODEL": str(find_bundled("tiny-glm")),
        "PATH": f"{place}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{place}:{os.environ.get('PYTHONPATH', '')}",
    }
    argv = [sys.executable, "-P", "-m", "windlass", "check", "--json", *(word.format(place=place) for word in words)]
    shell = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'set -e\n{prepare}\nexec "$@"', "sh"]
    try:
        done = subprocess.run(
            [*shell, *argv], env=environment | changes, capture_output=True, text=True, timeout=FOREVER, check=False, cwd=place
        )
    finally:
        if Path(BLKIO).is_dir():
            Path(BLKIO).rmdir()
    assert done.returncode in (0, 1, 2) and done.stdout.startswith("{"), done.stdout + done.stderr
    return json.loads(done.stdout)


def found(fault: Fault, place: Path) -> dict[str, str]:
    """The row that names the fault; fails if there is none."""
    rows = report(fault, place)["checks"]
    row = next((one for one in rows if one["name"] == fault.check and one["state"] != "pass"), None)
    assert row is not None, f"{fault.name}: not found among {rows}"
    said = f"{row['measured']} {row['remedy']}"
    assert row["state"] == fault.state and all(word in said for word in fault.says), row
    return row
