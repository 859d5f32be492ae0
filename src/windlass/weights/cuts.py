"""Where a checkpoint may be cut: the scheme whose quantum its codes have."""

from __future__ import annotations

from windlass.core.scheme import GROUPS, Scheme, scheme
from windlass.kernels.panels import BLOCK
from windlass.weights.checked import missing, placed
from windlass.weights.forms import Codes, form_of
from windlass.weights.named import Named
from windlass.weights.parts import Share, part_at
from windlass.weights.source import Opened


def scheme_of(opened: Opened) -> Scheme:
    """Between whole groups of all its packed matrices, so that they stay packed on every rank; plain ones anywhere."""
    codes = _codes(opened)
    if not codes:
        return scheme("bf16")
    group = max(found.group or BLOCK for found in codes)
    return scheme(
        "int4", group if group in GROUPS else max(GROUPS), zero_points=any(found.kind == "int4_zeros" for found in codes)
    )


def _codes(opened: Opened) -> set[Codes]:
    places, spec = opened.places or placed(opened.rules, opened.store), opened.spec
    experts = (0, spec.experts.num_experts) if spec.experts else None
    found: set[Codes] = set()
    for ours in Named(opened.rules).held(spec, (0, spec.num_layers), experts):
        if ours.layer is None or len(ours.shape) < 2:
            continue  # tables are cut between rows, of which each is whole
        if ours.name not in places:
            raise missing(ours)
        codes = form_of(opened.store, part_at(ours, places[ours.name], Share())).codes
        found |= {codes} if codes is not None else set()
    return found
