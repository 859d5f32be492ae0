"""Resident memory of an engine process stays under --host-memory, with a model that is larger: measured, while it loads and while it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")

from windlass.runtime.kernels.program import program  # noqa: E402
from windlass.units import MIB  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.long]

DENSE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 8192,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 1024, "intermediate_size": 2048,
    "moe_intermediate_size": 512, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "num_experts": 64, "num_experts_per_tok": 4, "vocab_size": 8192, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip
SCRIPT = """
import json, sys
from windlass.core.launch import Launch, RandomInit
from windlass.core.request import GREEDY
from windlass.runtime.engine.load import load_model
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.machine.memory import process_memory
config, cap, folder = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3] or None
engine, info = load_model(Launch(model="m", device="cpu", random_weights=RandomInit(config=config, scheme="bf16"), context_tokens=256,
    max_sequences=4, host_memory=cap or None, disk_folder=folder))
tokens = []
for number in range(3):
    engine.submit(Submit(id=number, token_ids=[(number * 31 + i) % 8000 for i in range(150)], sampling=GREEDY, max_tokens=8))
while engine.has_work:
    tokens += [(out.id, out.token_ids) for out in engine.step()]
peak, line = process_memory().peak_bytes, info.details.get("offload", "")
print(json.dumps({"peak": peak, "tokens": sorted(tokens), "weights": info.weights_bytes, "line": line}))
"""


def run(config: dict[str, object], cap: int, folder: str) -> dict[str, object]:
    given = [msgspec.json.encode(config).decode(), str(cap), folder]
    made = subprocess.run([sys.executable, "-c", SCRIPT, *given], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return msgspec.json.decode(made.stdout.splitlines()[-1])


@pytest.mark.skipif(not program.available(), reason="needs a compiler: PyTorch's own memory is not counted")
@pytest.mark.parametrize(
    ("config", "cap"), [pytest.param(DENSE, 1000 * MIB, id="dense"), pytest.param(MIXTURE, 900 * MIB, id="mixture")]
)
def test_memory_stays_under_the_cap_and_tokens_are_the_same(config: dict[str, object], cap: int, tmp_path: Path) -> None:
    folder = tmp_path / "tiers"
    folder.mkdir()
    free = run(config, 0, "")
    assert int(free["weights"]) > cap and not free["line"]  # type: ignore[call-overload]
    for _ in range(2):  # writes the file, then finds it
        capped = run(config, cap, str(folder))
        assert capped["line"] and int(capped["peak"]) <= cap, f"{capped['peak']} of {cap}"  # type: ignore[call-overload]
        assert capped["tokens"] == free["tokens"]
        assert len(list(folder.iterdir())) == 1
