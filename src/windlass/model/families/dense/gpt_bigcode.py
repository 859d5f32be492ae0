"""StarCoder: GPT-2 with one KV head for all, matrices stored [out, in]."""

from __future__ import annotations

import msgspec

from windlass.core.model import ModelSpec
from windlass.core.rule import Rule
from windlass.model.families.dense import gpt2
from windlass.model.families.reading.config import Config
from windlass.model.families.reading.hints import Hints
from windlass.model.families.reading.naming import FusedOrder, TensorNames, rules_from

NAMES: TensorNames = msgspec.structs.replace(gpt2.NAMES, transposed=False)
# Without multi-query the projection is fused head by head.
_MULTI_HEAD: TensorNames = msgspec.structs.replace(NAMES, fused_order=FusedOrder.GROUPED)


def describe(config: Config, hints: Hints) -> ModelSpec:
    multi_query = config.flag("multi_query", default=True)
    config.expect("num_key_value_heads", 1 if multi_query else config.integer("n_head", "num_attention_heads"))
    return gpt2.read_gpt(config, "gpt_bigcode", default_activation="gelu_pytorch_tanh", num_kv_heads=1 if multi_query else None)


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    multi_query = spec.attention.kv_elements != spec.attention.score_width
    return rules_from(spec, NAMES if multi_query else _MULTI_HEAD)
