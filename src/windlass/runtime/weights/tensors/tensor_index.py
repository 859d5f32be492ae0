"""Looks up tensors by our name: `layers.3.ffn.experts.7.gate.weight` -> rule, layer and expert. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from windlass.core.model import ModelSpec
from windlass.core.place import Interval
from windlass.core.rule import ModelPart, Rule
from windlass.errors import UnknownName
from windlass.runtime.weights.tensors.readers import ModelTensor

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")


class TensorIndex:
    """Every tensor of a model by our name. Layers of different kinds have different rules under the same name."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.rules = rules
        self._rules: dict[tuple[str, int | None], Rule] = {}
        for rule in rules:
            for layer in rule.layers if rule.layers is not None else (None,):
                self._rules[rule.ours, layer] = rule

    def find(self, name: str) -> ModelTensor | None:
        """None where this model has no such tensor."""
        in_layer = _LAYER.fullmatch(name)
        layer, template = (int(in_layer[1]), f"layers.{{layer}}.{in_layer[2]}") if in_layer else (None, name)
        of_expert = _EXPERT.fullmatch(template)
        expert, template = (int(of_expert[2]), f"{of_expert[1]}.{{expert}}.{of_expert[3]}") if of_expert else (None, template)
        rule = self._rules.get((template, layer))
        return None if rule is None else ModelTensor(rule=rule, layer=layer, expert=expert)

    def get(self, name: str) -> ModelTensor:
        found = self.find(name)
        if found is None:
            raise UnknownName("tensor", name, {template for template, _ in self._rules})
        return found

    def expert_rule(self, layer: int, part: str, kind: str = "weight") -> Rule | None:
        return self._rules.get((f"layers.{{layer}}.ffn.experts.{{expert}}.{part}.{kind}", layer))

    def held(self, spec: ModelSpec, layers: Interval, experts: Interval | None) -> Iterator[ModelTensor]:
        """Every tensor of a pipeline stage with these layers, without the MTP layer."""
        for rule in self.rules:
            if rule.part is not ModelPart.MAIN or rule.copy_of is not None:
                continue
            if rule.layers is None:
                if _on_stage(rule, spec, layers):
                    yield ModelTensor(rule=rule)
                continue
            numbers = range(*(experts or (0, rule.num_experts))) if rule.num_experts else (None,)
            for layer in rule.layers:
                if layers[0] <= layer < layers[1]:
                    yield from (ModelTensor(rule=rule, layer=layer, expert=number) for number in numbers)

    def next_token(self) -> Iterator[ModelTensor]:
        """Every tensor of the MTP layer, without copies of embedding and head."""
        for rule in self.rules:
            if rule.part is ModelPart.NEXT_TOKEN and rule.copy_of is None:
                numbers = range(rule.num_experts) if rule.num_experts else (None,)
                yield from (
                    ModelTensor(rule=rule, layer=layer, expert=number) for layer in rule.layers or () for number in numbers
                )


def _on_stage(rule: Rule, spec: ModelSpec, layers: Interval) -> bool:
    """Tensors outside the layers: embeddings on the first stage, final norm and head (or the tied embedding) on the last."""
    first, last = layers[0] == 0, layers[1] == spec.num_layers
    if rule.ours == "embed.weight":
        return first or (last and spec.tied_head)
    return first if rule.ours.startswith(("embed", "positions")) else last
