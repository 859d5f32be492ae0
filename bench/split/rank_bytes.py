"""Bytes on the wire, by the interfaces' own counters: the 1.10B shape decoded by ranks that are hosts of their own (network namespaces).

Packets are cut to Ethernet's size before they are counted (no segmentation offload), so headers, acknowledgements, the steps that rank 0
tells of and everything else are in the numbers. Needs root.

    python bench/split/rank_bytes.py [--ranks 3,4] [--batch 1,8] [--sync int8,exact] [--steps 24] [--layers 22]
"""

from __future__ import annotations

import argparse
import array
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "runtime" / "fleet"))
sys.path.insert(0, str(Path(__file__).parent))

from hosts import Hosts, lacking
from rank_speed import SHAPE, decode

CONTEXT = 64
SIOCETHTOOL = 0x8946
OFFLOADS = {"TSO": 0x1F, "GSO": 0x24, "GRO": 0x2C}
"""ETHTOOL_S..., linux/ethtool.h"""
LIMITS = {3: 0.70, 4: 0.53}


def main() -> None:
    asked = _arguments()
    if asked.rank >= 0:
        _rank(json.loads(asked.job), asked.rank)
        return
    if why := lacking():
        sys.exit(why)
    for count in map(int, asked.ranks.split(",")):
        for sync in asked.sync.split(","):
            for batch in map(int, asked.batch.split(",")):
                _measure(asked, count, sync, batch)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", "3,4"), ("batch", "1,8"), ("sync", "int8")):
        parser.add_argument(f"--{name}", default=value)
    for name, value in (("steps", 24), ("layers", SHAPE["num_hidden_layers"])):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--job", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(asked: argparse.Namespace, count: int, sync: str, batch: int) -> None:
    with Hosts(count) as hosts, tempfile.TemporaryDirectory() as folder:
        job = {
            "folder": folder, "hosts": [hosts.address(number) for number in hosts.numbers], "key": os.urandom(32).hex(),
            "sync": sync, "batch": batch, "steps": asked.steps, "layers": asked.layers,
        }  # fmt: skip
        command = [sys.executable, __file__, "--job", json.dumps(job), "--rank"]
        env = {**os.environ, "WINDLASS_THREADS": "1", "OMP_NUM_THREADS": "1"}
        ranks = [
            hosts.start(number, [*command, str(number - 1)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
            for number in hosts.numbers
        ]
        root = ranks[0]
        assert root.stdout is not None and root.stdin is not None
        assert root.stdout.readline() == "ready\n"
        time.sleep(0.2)
        before = [hosts.counted(number) for number in hosts.numbers]
        root.stdin.write("go\n")
        root.stdin.flush()
        found = json.loads(root.stdout.readline())
        time.sleep(0.2)  # the last acknowledgements
        sent = [hosts.counted(number).since(earlier).sent_bytes for number, earlier in zip(hosts.numbers, before, strict=True)]
    _print(count, sync, batch, asked, sent, found)


def _print(count: int, sync: str, batch: int, asked: argparse.Namespace, sent: list[int], found: dict[str, Any]) -> None:
    tokens = asked.steps * batch
    formula = asked.layers * 2 * (count - 1) * SHAPE["hidden_size"] * 34 / 32
    ratios = [bytes_sent / tokens / formula for bytes_sent in sent]
    told = sum(row[1] for row in found["counts"].values()) / tokens
    print(
        f"{count} ranks, {sync}, batch {batch}: {', '.join(f'{one / tokens:,.0f}' for one in sent)} bytes a token sent by each,"
        f" {max(ratios):.4f} of {formula:,.0f} at most (mean {sum(ratios) / count:.4f}"
        + (f", wanted {LIMITS[count]:.2f}" if count in LIMITS else "")
        + f"); rank 0's numbers alone {told:,.0f}; {tokens / found['seconds']:.2f} tokens/s",
        flush=True,
    )


# --- a rank


def _rank(job: dict[str, Any], rank: int) -> None:
    _cut_packets("v")
    from windlass.core.launch import Launch, RandomInit, RankJob
    from windlass.core.layout import Layout
    from windlass.core.ranks.rendezvous import Meeting
    from windlass.runtime.engine.ranks import first
    from windlass.runtime.parallel.store import FolderStore

    world = len(job["hosts"])
    meeting = Meeting(key=bytes.fromhex(job["key"]), hosts=tuple(job["hosts"]), machines=tuple(range(world)), sync=job["sync"])
    random = RandomInit(config={**SHAPE, "num_hidden_layers": job["layers"]}, scheme="int4", group=32)
    launch = Launch(
        model="1.10B", device="cpu", context_tokens=CONTEXT + 2 * job["steps"], random_weights=random, layout=Layout(tp=world),
        max_sequences=job["batch"], max_step_tokens=128,
    )  # fmt: skip
    part = RankJob(launch=launch, rank=rank, meeting=meeting)
    store = FolderStore(job["folder"])
    built = first.build_rank(part, store)
    if rank == 0:
        _lead(part, store, built, job)
    else:
        _follow(part, store, built)


def _lead(part: Any, store: Any, built: Any, job: dict[str, Any]) -> None:
    import msgspec

    from windlass.runtime.engine.ranks import first
    from windlass.runtime.engine.ranks.broadcast import StepBroadcast, broadcast_steps

    with StepBroadcast() as steps:
        broadcast_steps(built.decoder, steps)
        engine = first._engine(part.launch, built)
        store.put(first.LIMITS_KEY, msgspec.msgpack.encode(engine.limits))
        steps.connect(part.rank, part.meeting, store)
        decode(engine, job["batch"], CONTEXT, 2)
        print(json.dumps(decode(engine, job["batch"], CONTEXT, job["steps"], _wait)), flush=True)


def _wait() -> None:
    """Prompts are read: what is sent from now on is of single tokens."""
    print("ready", flush=True)
    sys.stdin.readline()


def _follow(part: Any, store: Any, built: Any) -> None:
    import msgspec

    from windlass.runtime.engine.ranks import first
    from windlass.runtime.engine.ranks.follower import Follower, _steps
    from windlass.runtime.engine.schedule.scheduler import SchedulerLimits
    from windlass.runtime.parallel.group import GroupLost

    limits = msgspec.msgpack.decode(store.take(first.LIMITS_KEY, 100), type=SchedulerLimits)
    follower = Follower(built.decoder, limits, part.launch.kv_type, built.device)
    try:
        follower.follow(_steps(part.rank, part.meeting, store))
    except GroupLost:
        return


def _cut_packets(interface: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in OFFLOADS.values():
            value = array.array("B", struct.pack("II", command, 0))
            fcntl.ioctl(control, SIOCETHTOOL, struct.pack("16sP", interface.encode(), value.buffer_info()[0]))


if __name__ == "__main__":
    main()
