"""What a LoRA adapter costs while serving: prompts and generation of a mixture, without adapters, with one of attention alone, and with one
of every matrix, the routed experts included.

Run: python bench/serve/adapters.py [--rank 16] [--sequences 8] [--prompt 128] [--new 16] [--rounds 3]

The weights are random (glm4_moe's layers, int4, 8 of 64 experts), and so are the adapters. The engine runs in this process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from windlass.core.launch import Launch, RandomInit
from windlass.core.request import GREEDY
from windlass.model.families import rules
from windlass.runtime.engine.adapters import AdapterChanges
from windlass.runtime.engine.load import load_model
from windlass.runtime.engine.protocol import AddAdapter, Submit
from windlass.runtime.weights.adapters import published_matrices

CONFIG: dict[str, Any] = {
    "model_type": "glm4_moe", "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512,
    "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024,
    "n_routed_experts": 64, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "attention_bias": False,
    "use_qk_norm": False, "tie_word_embeddings": False, "partial_rotary_factor": 0.5,
}  # fmt: skip


def make_adapter(folder: Path, spec: Any, rank: int, only: str) -> None:
    """As PEFT writes one."""
    source, made = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for module, (ours, (out, into)) in published_matrices(rules(spec)).items():
        if only in ours and "router" not in ours:
            made[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, into, generator=source) / into**0.5
            made[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out, rank, generator=source) * 0.01
    folder.mkdir()
    save_file(made, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def speeds(engine: Any, adapter: str, number: int, asked: argparse.Namespace) -> tuple[float, float]:
    """Tokens/s of prompts, and of generation."""
    sequences: int = asked.sequences
    for place in range(sequences):
        prompt = [(7 + 31 * (number * sequences + place) + 13 * token) % 8000 for token in range(asked.prompt)]
        salt = f"{adapter}{number}"
        engine.submit(
            Submit(
                1000 * number + place, prompt, GREEDY, max_tokens=asked.new, adapter=adapter, cache_salt=salt, stop_token_ids=[]
            )
        )
    began, first, left, tokens = time.perf_counter(), 0.0, sequences, 0
    waiting = set(range(1000 * number, 1000 * number + sequences))
    while left:
        for output in engine.step():
            waiting -= {output.id} if output.token_ids else set()
            tokens += len(output.token_ids) if first else 0
            left -= output.finish is not None
        if not waiting and not first:
            first = time.perf_counter()
    return sequences * asked.prompt / (first - began), tokens / (time.perf_counter() - first)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        random = RandomInit(config=CONFIG, scheme="int4", group=32)
        launch = Launch(model="mixture", device="cpu", context_tokens=256, max_sequences=asked.sequences, random_weights=random)
        engine, _ = load_model(launch)
        kinds = {"": "none", "attention": ".mixer.", "all": ""}
        changes = AdapterChanges(engine)
        for name in ("attention", "all"):
            make_adapter(Path(root) / name, engine.runner.decoder.spec, asked.rank, kinds[name])
            changes.add(AddAdapter(1, name, str(Path(root) / name)))
            while len(changes):
                changes.finished()
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        for number in range(asked.rounds + 1):
            for name in kinds:
                measured = speeds(engine, name, 10 * number + list(kinds).index(name), asked)
                if number:
                    found[name].append(measured)
    for name, pairs in found.items():
        prompt, new = (statistics.median(values) for values in zip(*pairs, strict=True))
        print(
            f"adapter {name or 'none':9s}: {prompt:7.1f} prompt tokens/s, {new:6.1f} generated tokens/s, {asked.sequences} at once"
        )


if __name__ == "__main__":
    main()
