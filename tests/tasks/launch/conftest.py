"""Plans to render, and a tiny model with experts that vLLM's CPU build takes."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from windlass.core.hardware.parse import parse_hardware
from windlass.core.plan import Plan
from windlass.model.families import rules
from windlass.model.families.registry import find, spec_of
from windlass.tasks.plan.inference.assemble import make_plan
from windlass.tasks.plan.inference.search.request import PlanRequest

HERE, TESTS = Path(__file__).parent, next(folder for folder in Path(__file__).parents if folder.name == "tests")
for folder in (str(TESTS), str(HERE)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from waiting import hear_interrupts  # noqa: E402

hear_interrupts()

MakePlan = Callable[..., Plan]

# Heads of 32 and experts of 64: vLLM's CPU kernels take no smaller ones.
TINY_MOE = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "intermediate_size": 256,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "attention_bias": True,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "eos_token_id": None,
    "bos_token_id": None,
}


@pytest.fixture(scope="session")
def make() -> MakePlan:
    """A plan for vLLM, unless `engine` says otherwise."""

    def made(model: str, hardware: str, **changes: Any) -> Plan:
        known = find(model)
        assert known is not None
        spec = spec_of(known)
        asked = PlanRequest(spec=spec, rules=rules(spec), hardware=parse_hardware(hardware), context_tokens=8192, engine="vllm")
        return make_plan(replace(asked, **changes))

    return made


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GLM-4.5 of 3 layers in fp32, with a tokenizer of 64 characters."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny-moe")
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING["glm4_moe"](**TINY_MOE)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, value in model.state_dict().items():
        if value.dim() > 1:
            value.copy_(torch.randn_like(value) * (1.0 if "embed" in name else 1.3 * value.shape[-1] ** -0.5))
    model.save_pretrained(folder)
    text = _neighbour(Path(__file__).parents[2] / "runtime" / "engine" / "fake_text.py")
    text.model_text().tokenizer.backend.save(str(folder / "tokenizer.json"))
    words = {"chat_template": text.TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


def _neighbour(file: Path) -> Any:
    """Test files are no package: one that makes things for others is loaded by its path."""
    name = f"neighbour_{file.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
