"""The rules that read one stored tensor cover each of its rows exactly once, and read the rows that the modelling code reads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest

from windlass.core.rule import Rule, Source, source_names, stored_shape
from windlass.model.families import describe, rules
from windlass.model.families.registry import known_models, spec_of

pytestmark = pytest.mark.pure

TINY = {path.stem: path for path in sorted((Path(__file__).parent / "tiny").glob("*.json"))}


def tiny_rules(name: str, **changes: Any) -> tuple[Rule, ...]:
    return rules(describe(json.loads(TINY[name].read_text()) | changes))


def readers(made: Iterable[Rule], choice: int) -> dict[str, list[tuple[Rule, Source, int | None]]]:
    """Stored name -> the rules that read it, and for which expert."""
    found: dict[str, list[tuple[Rule, Source, int | None]]] = {}
    for rule in made:
        source = rule.sources[min(choice, len(rule.sources) - 1)]
        for name, _, expert in source_names(rule, source):
            found.setdefault(name, []).append((rule, source, expert))
    return found


def rows_read(rule: Rule, source: Source) -> list[int]:
    return [source.rows.stored(row) if source.rows else row for row in range(rule.shape[0])]


@pytest.mark.parametrize("choice", [0, 1])
@pytest.mark.parametrize("name", TINY)
def test_every_row_once(name: str, choice: int) -> None:
    for stored, group in readers(tiny_rules(name), choice).items():
        rule, source, _ = group[0]
        shapes = {stored_shape(other, theirs) for other, theirs, _ in group}
        assert len(shapes) == 1, stored
        rows = Counter(row for other, theirs, _ in group for row in rows_read(other, theirs))
        total = source.fused_rows if source.fused_rows is not None else rule.shape[0]
        assert rows == Counter(range(total)), stored


@pytest.mark.parametrize("model", known_models(), ids=lambda model: model.name)
def test_rows_add_up(model: Any) -> None:
    """On full sizes by counting: parts add up to the whole, stay inside it, and no two begin alike."""
    for choice in (0, 1):
        fused: dict[tuple[str, tuple[int, ...] | None], list[tuple[Rule, Source]]] = {}
        for rule in rules(spec_of(model)):
            source = rule.sources[min(choice, len(rule.sources) - 1)]
            fused.setdefault((source.name, rule.layers), []).append((rule, source))
        for (stored, _), group in fused.items():
            total = group[0][1].fused_rows
            if total is None:
                assert len(group) == 1, stored
                continue
            assert sum(rule.shape[0] for rule, _ in group) == total
            assert len({source.rows.offset for _, source in group if source.rows}) == len(group)
            for rule, source in group:
                assert source.rows is not None and rule.shape[0] % source.rows.block == 0
                assert source.rows.stored(rule.shape[0] - 1) < total
                assert rule.shape[0] // source.rows.block * source.rows.stride == total


def part(made: Iterable[Rule], ending: str) -> list[int]:
    """Stored rows of our tensor in layer 0 (and its first expert), last alternative."""
    rule = next(rule for rule in made if rule.ours.endswith(ending) and rule.in_layer(0))
    return rows_read(rule, rule.sources[-1])


# Each entry: how the modelling code views the fused rows, as (query, key, value) row numbers.
def per_kv_head(heads: int, kv: int, dim: int) -> list[Any]:
    """view(kv, heads / kv + 2, dim): Falcon's; with kv = heads BLOOM's and GPT-NeoX's (heads, 3, dim)."""
    rows = numpy.arange((heads + 2 * kv) * dim).reshape(kv, heads // kv + 2, dim)
    return [rows[:, :-2].ravel(), rows[:, -2].ravel(), rows[:, -1].ravel()]


def one_after_another(heads: int, kv: int, dim: int) -> list[Any]:
    return numpy.split(numpy.arange((heads + 2 * kv) * dim), [heads * dim, (heads + kv) * dim])


@pytest.mark.parametrize(
    ("name", "view"),
    [
        ("falcon-7b", per_kv_head(5, 1, 6)),
        ("falcon-40b", per_kv_head(6, 2, 6)),
        ("falcon-rw", per_kv_head(5, 5, 6)),
        ("bloom", per_kv_head(5, 5, 6)),
        ("gpt_neox", per_kv_head(5, 5, 8)),
        ("gpt_bigcode-multi_head", per_kv_head(5, 5, 6)),
        ("gpt_bigcode", one_after_another(5, 1, 6)),
        ("gpt2", one_after_another(5, 5, 6)),
        ("chatglm", one_after_another(6, 2, 8)),
    ],
)
def test_fused_queries_keys_and_values(name: str, view: list[Any]) -> None:
    made = tiny_rules(name)
    for ours, rows in zip("qkv", view, strict=True):
        assert part(made, f"mixer.{ours}.weight") == rows.tolist()


@pytest.mark.parametrize(("name", "width", "stem"), [("glm4", 13, "ffn"), ("chatglm", 13, "ffn"), ("mixtral", 13, "{expert}")])
def test_gate_comes_first(name: str, width: int, stem: str) -> None:
    made = tiny_rules(name)
    assert part(made, f"{stem}.gate.weight") == list(range(width))
    assert part(made, f"{stem}.up.weight") == list(range(width, 2 * width))


def test_gpt_oss_interleaves_gate_and_up() -> None:
    made = tiny_rules("gpt_oss")
    for suffix in ("weight", "bias"):
        assert part(made, f"gate.{suffix}") == list(range(0, 64, 2))
        assert part(made, f"up.{suffix}") == list(range(1, 64, 2))


def test_only_gpt2_is_stored_transposed() -> None:
    """And gpt-oss's plain experts, whose inputs come first as well."""
    for name in TINY:
        turned = {rule.ours for rule in tiny_rules(name) if rule.sources[-1].transposed}
        if name == "gpt2":
            assert turned == {
                f"layers.{{layer}}.{part}.weight" for part in ("mixer.q", "mixer.k", "mixer.v", "mixer.o", "ffn.up", "ffn.down")
            }
        elif name == "gpt_oss":
            assert turned == {f"layers.{{layer}}.ffn.experts.{{expert}}.{part}.weight" for part in ("gate", "up", "down")}
        else:
            assert not turned
