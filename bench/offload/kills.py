"""Kills a model with weights on disk at random moments of loading and running: nothing may be left over, and the next start must work.

    python bench/offload/kills.py --folder DIR [--kills 50] [--tp 2]

Alternates between kills while the file is written (the folder is emptied first) and kills of a process that found the file. After each, the
folder holds either nothing or complete files, one a rank at most, and no process, shared memory or other file remains. Every fifth start runs
to its end, and must give the same tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

CONFIG = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 512, "intermediate_size": 1024,
    "moe_intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "num_experts": 32, "num_experts_per_tok": 4, "vocab_size": 8192, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip
SCRIPT = """
import json, sys
from windlass.core.launch import Launch, RandomInit
from windlass.core.request import GREEDY, Request
from windlass.core.tiers.values import TierPlacement
from windlass.core.layout import Layout
from windlass.runtime.engine.client.client import open_client
from windlass.core.client import SyncClient
tp = int(sys.argv[3])
tiers = TierPlacement(disk_units=tuple(f"layers.{n}.mixer.q+k+v" for n in range(0, 8, 2)), ring_bytes=2**22, num_experts=256 // tp,
    expert_bytes=2**20, host_slots=40 // tp, disk_experts=256 // tp, disk_bytes=0)
launch = Launch(model="kills", device="cpu", random_weights=RandomInit(config=json.loads(sys.argv[1]), scheme="bf16"),
    disk_folder=sys.argv[2], tiers=(tiers,), context_tokens=128, max_sequences=1, layout=Layout(tp=tp, ep=tp))

def opened():
    if tp == 1:
        return open_client(launch, needs_text=False)
    from windlass.runtime.fleet.root.client import FleetClient
    from windlass.open.fleet import open_fleet
    return FleetClient(open_fleet(launch, lambda _: None, lambda _: None))

print("started", flush=True)
with SyncClient(opened()) as client:
    tokens = []
    for delta in client.generate(Request(token_ids=tuple(range(5, 40)), sampling=GREEDY, max_tokens=64)):
        tokens += delta.token_ids
    print(json.dumps(tokens), flush=True)
"""


def start(folder: Path, tp: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SCRIPT, json.dumps(CONFIG), str(folder), str(tp)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def engine_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Processes of its session that still run."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(stat[3]) == process.pid and stat[0] != "Z":
                found.append(int(entry.name))
    return found


def wait_for(condition: object, seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--tp", type=int, default=1, help="ranks, each with its part of the experts")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(options.seed)
    shared = set(Path("/dev/shm").iterdir())
    process = start(options.folder, options.tp)
    began = time.monotonic()
    out, errors = process.communicate()
    whole = time.monotonic() - began
    assert process.returncode == 0, errors.decode()
    expected = out.splitlines()[-1]
    outcomes: dict[str, int] = {}
    for number in range(options.kills):
        if number % 2 == 0:
            for file in options.folder.iterdir():
                file.unlink()
        process = start(options.folder, options.tp)
        time.sleep(chance.uniform(0, whole))
        kind = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
        process.send_signal(kind)
        process.communicate()
        assert wait_for(lambda: not engine_of(process)), f"kill {number}: processes {engine_of(process)} are left"  # noqa: B023
        left = sorted(path.name for path in options.folder.iterdir())
        assert len(left) <= options.tp and all(name.endswith(".tier") for name in left), f"kill {number}: {left} are left"
        assert not {path for path in set(Path("/dev/shm").iterdir()) - shared if "windlass" in path.name}, (
            f"kill {number}: shared memory is left"
        )
        outcome = f"{kind.name}, {f'{len(left)} complete files' if left else 'nothing'} in the folder"
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if number % 5 == 4:
            out, errors = start(options.folder, options.tp).communicate()
            assert out.splitlines()[-1:] == [expected], f"after kill {number}: {errors.decode()}"
    for name, count in sorted(outcomes.items()):
        print(f"{count} times: {name}")
    print(
        f"{options.kills} kills over {whole:.1f} s each; nothing left over, {options.kills // 5} later starts gave the same tokens"
    )


if __name__ == "__main__":
    main()
