"""Architectures of Distributed Llama's `.m` files, and the order of their tensors under Hugging Face names.

The order is that of converter/convert-hf.py of Distributed Llama 0.16, in our tensor names; shapes and stored names come from the
family's rules. A model with any other tensor cannot be written. GLM-4.5 models use an extension of Windlass, which Distributed
Llama refuses. Knows no bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from windlass.core.model import Attention, Frozen, ModelSpec
from windlass.core.rule import ModelPart, Role, Rule
from windlass.core.scheme import Keep
from windlass.errors import Impossible
from windlass.model.families import rules


class DllamaArchitecture(Frozen):
    number: int
    """`arch_type` in the header."""
    model_type: str
    class_name: str
    """What transformers calls the model."""
    pairs: bool = False
    """Q and K rows are permuted for rotation of adjacent pairs instead of halves."""
    own: bool = False
    """A Windlass extension."""


ARCHITECTURES = (
    DllamaArchitecture(number=0xABCD00, model_type="llama", class_name="LlamaForCausalLM", pairs=True),
    DllamaArchitecture(number=0xABCD01, model_type="qwen3", class_name="Qwen3ForCausalLM"),
    DllamaArchitecture(number=0xABCD02, model_type="qwen3_moe", class_name="Qwen3MoeForCausalLM"),
    DllamaArchitecture(number=0x574C4D01, model_type="glm4_moe", class_name="Glm4MoeForCausalLM", own=True),
)
_BY_FAMILY = {known.model_type: known for known in ARCHITECTURES} | {"mistral": ARCHITECTURES[0]}

# Our names in file order. Tensors that a model does not have (biases, experts, QK norms) are skipped.
_MIXER = ("mixer.q.weight", "mixer.q.bias", "mixer.k.weight", "mixer.k.bias", "mixer.v.weight", "mixer.v.bias", "mixer.o.weight")
_DENSE = ("ffn.gate.weight", "ffn.down.weight", "ffn.up.weight")
_ROUTER = ("ffn.router.weight", "ffn.router.correction")
_EXPERT = ("ffn.experts.{expert}.gate.weight", "ffn.experts.{expert}.down.weight", "ffn.experts.{expert}.up.weight")
_SHARED = ("ffn.shared.gate.weight", "ffn.shared.down.weight", "ffn.shared.up.weight")
_NORMS = ("mixer.q_norm.weight", "mixer.k_norm.weight", "mixer_norm.weight", "ffn_norm.weight")
_OWN_ONLY = frozenset({"mixer.q.bias", "mixer.k.bias", "mixer.v.bias", "ffn.router.correction", *_SHARED})
_PAIRED = frozenset({"mixer.q.weight", "mixer.k.weight"})


class FileTensor(Frozen):
    """One tensor of the file."""

    name: str
    """Hugging Face name. The head of a tied model is its embedding, stored a second time."""
    shape: tuple[int, ...]
    packed: bool
    """In the header's weight type; otherwise always F32."""
    head_dim: int = 0
    """Rows are permuted within heads of this size; 0: not permuted."""


def architecture(spec: ModelSpec) -> DllamaArchitecture:
    found = _BY_FAMILY.get(spec.family)
    if found is None:
        raise Impossible(
            f"Distributed Llama files do not support {spec.family} models; supported: {', '.join(sorted(_BY_FAMILY))}. Use --to hf"
        )
    return found


def tensor_order(spec: ModelSpec) -> Iterator[FileTensor]:
    """Every tensor in file order. Raises Impossible up front for a model with any other tensor."""
    kind = architecture(spec)
    table = _Table(spec, kind)
    if unplaced := sorted(table.names() - _allowed(kind)):
        raise Impossible(f"Distributed Llama files of {kind.model_type} models cannot store {', '.join(unplaced)}. Use --to hf")
    return _walk(spec, table)


def _allowed(kind: DllamaArchitecture) -> set[str]:
    names = {"embed.weight", "norm.weight", "head.weight", *_MIXER, *_DENSE, *_ROUTER, *_EXPERT, *_SHARED, *_NORMS}
    return names if kind.own else names - _OWN_ONLY


def _walk(spec: ModelSpec, table: _Table) -> Iterator[FileTensor]:
    yield table.whole("embed.weight", packed=False)
    for layer in range(spec.num_layers):
        yield from table.layer(layer)
    yield table.whole("norm.weight", packed=False)
    yield table.whole("embed.weight" if spec.tied_head else "head.weight", packed=True)


class _Table:
    """The family's rules by our name, per layer."""

    def __init__(self, spec: ModelSpec, kind: DllamaArchitecture) -> None:
        self._whole: dict[str, Rule] = {}
        self._layers: list[dict[str, Rule]] = [{} for _ in spec.layers]
        mixer = spec.attention
        self._head_dim = mixer.head_dim if kind.pairs and isinstance(mixer, Attention) else 0
        for rule in rules(spec):
            if rule.part is not ModelPart.MAIN:
                continue
            if rule.layers is None:
                self._whole[rule.ours] = rule
            for layer in rule.layers or ():
                self._layers[layer][rule.ours.removeprefix("layers.{layer}.")] = rule

    def names(self) -> set[str]:
        return set(self._whole).union(*self._layers)

    def whole(self, ours: str, *, packed: bool) -> FileTensor:
        rule = self._whole[ours]
        return FileTensor(name=rule.sources[0].name, shape=rule.shape, packed=packed)

    def layer(self, layer: int) -> Iterator[FileTensor]:
        found = self._layers[layer]
        experts = found[_EXPERT[0]].num_experts if _EXPERT[0] in found else 0
        for ours in (*_MIXER, *_DENSE, *_ROUTER):
            if ours in found:
                yield self._tensor(found[ours], ours, layer)
        for expert in range(experts):
            for ours in _EXPERT:
                yield self._tensor(found[ours], ours, layer, expert)
        for ours in (*_SHARED, *_NORMS):
            if ours in found:
                yield self._tensor(found[ours], ours, layer)

    def _tensor(self, rule: Rule, ours: str, layer: int, expert: int | None = None) -> FileTensor:
        return FileTensor(
            name=rule.sources[0].name.format(layer=layer, expert=expert),
            shape=rule.shape,
            packed=rule.role is Role.MATRIX and rule.keep is not Keep.HIGH,
            head_dim=self._head_dim if ours in _PAIRED else 0,
        )


def notes(spec: ModelSpec) -> tuple[str, ...]:
    """Warnings for the user who writes such a file."""
    kind, mixer, warnings = architecture(spec), spec.attention, list[str]()
    if kind.own:
        warnings.append(
            f"architecture {kind.number:#x} ({kind.model_type}) is a Windlass extension: Windlass runs this file, "
            "stock Distributed Llama refuses it"
        )
    if isinstance(mixer, Attention) and mixer.window is not None and mixer.window < spec.context_tokens:
        warnings.append(f"the format has no sliding windows: the context is limited to the window of {mixer.window} tokens")
    if spec.next_token is not None:
        warnings.append("the format has no multi-token-prediction layer: it is left out")
    return tuple(warnings)
