"""CPU ranks that share --host-memory, each with its part of a model that is larger: same tokens, and resident memory of each rank under its cap.

python bench/offload/ranks.py --folder DIR
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from windlass.cli.bench.ranks import InlineRanks
from windlass.core.launch import Launch, RandomInit
from windlass.core.layout import Layout
from windlass.core.request import GREEDY
from windlass.runtime.engine.load import load_model
from windlass.runtime.engine.protocol import Submit
from windlass.units import MIB, format_bytes

COMMON = {
    "vocab_size": 8192, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "hidden_size": 1024,
}  # fmt: skip
DENSE = COMMON | {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "intermediate_size": 6144, "num_hidden_layers": 32,
}  # fmt: skip
MIXTURE = COMMON | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "intermediate_size": 2048, "moe_intermediate_size": 512,
    "num_hidden_layers": 12, "num_experts": 64, "num_experts_per_tok": 4, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any], Layout]] = [
    ("dense", DENSE, Layout(tp=2)),
    ("dense", DENSE, Layout(pp=2)),
    ("mixture", MIXTURE, Layout(tp=2, ep=2)),
    ("mixture", MIXTURE, Layout(tp=2)),
    ("mixture", MIXTURE, Layout(pp=2)),
]


def resident(pid: int) -> int:
    """The highest so far of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def children() -> list[int]:
    """The other ranks: what this process has started with the engine's module."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if int(stat[1]) == os.getpid() and b"windlass.runtime.engine.ranks.follower" in words:
                found.append(int(entry.name))
    return found


def run(config: dict[str, Any], layout: Layout, cap: int | None, folder: str | None) -> tuple[list[Any], list[int], str]:
    """Tokens with log-probabilities, the other ranks' resident memory, and what went where."""
    launch = Launch(
        model="m", device="cpu", random_weights=RandomInit(config=config, scheme="bf16"), context_tokens=256, max_sequences=4,
        host_memory=cap, disk_folder=folder, layout=layout,
    )  # fmt: skip
    with InlineRanks(lambda _: None, lambda _: None) as ranks:
        engine, info = load_model(launch) if launch.is_single else ranks.load(launch, lambda _done, _total: None)
        for number in range(3):
            prompt = [(number * 31 + place) % 8000 for place in range(150)]
            engine.submit(Submit(id=number, token_ids=prompt, sampling=GREEDY, max_tokens=8, logprobs=0))
        tokens = []
        while engine.has_work:
            tokens += [(out.id, out.token_ids, out.logprobs[0].logprob) for out in engine.step() if out.token_ids]
        peaks = [resident(pid) for pid in children()]
        engine.close()
    return sorted(tokens), peaks, info.details.get("offload", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--host-memory", type=int, default=1800, help="MiB, of both ranks")
    options = parser.parse_args()
    cap = options.host_memory * MIB
    for name, config, layout in CASES:
        free, peaks, _ = run(config, layout, None, None)
        print(f"{name}, {layout}: in memory the other rank has {format_bytes(max(peaks))}", flush=True)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            for what in ("writes its file", "finds it"):
                tokens, peaks, line = run(config, layout, cap, folder)
                verdict = "the same" if tokens == free else "OTHER"
                within = "within" if max(peaks) <= cap // layout.world else "OVER"
                print(
                    f"  {what}: {verdict} tokens and log-probabilities; the other rank has {format_bytes(max(peaks))}, {within} its "
                    f"{format_bytes(cap // layout.world)}; rank 0: {line.partition(' in /')[0]}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
