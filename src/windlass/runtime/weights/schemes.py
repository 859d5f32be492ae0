"""The schemes of an opened checkpoint: one for where its matrices may be split, one for how much memory they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

import msgspec
import torch

from windlass.core.ggml.forms import FORMS, held_bits
from windlass.core.scheme import GROUPS, Scheme, scheme
from windlass.runtime.kernels.packing.panels import BLOCK
from windlass.runtime.weights.source import OpenedModel
from windlass.runtime.weights.tensors.readers import ModelTensor
from windlass.runtime.weights.tensors.storage_format import StorageFormat, StorageFormats
from windlass.runtime.weights.tensors.tensor_index import TensorIndex
from windlass.runtime.weights.tensors.validate import locate_tensors, missing_tensor

LEAST_PIECES = 8
"""Rows of fewer blocks of 256 than this are cut within blocks: a rank then holds the blocks at its edges too, and its slice as bf16."""


def cutting_scheme(opened: OpenedModel) -> Scheme:
    """For placement: cuts on whole groups of every quantized matrix, so that all stay quantized on every rank."""
    forms = [(ours, form.codes) for ours, form in _forms(opened) if form.codes is not None]
    if not forms:
        return scheme("bf16")
    groups = {codes.group or BLOCK for _, codes in forms if codes.kind not in FORMS} | {BLOCK}
    group, zeros = max(groups), any(codes.kind == "int4_zeros" for _, codes in forms)
    made = scheme("int4", group if group in GROUPS else max(GROUPS), zero_points=zeros)
    rows = [ours.shape[-1] // codes.group for ours, codes in forms if codes.kind in FORMS and codes.group > BLOCK]
    return msgspec.structs.replace(made, group=max(group, 256)) if rows and min(rows) >= LEAST_PIECES else made


def sizing_scheme(opened: OpenedModel) -> Scheme:
    """For memory predictions: the scheme closest to how most of its weights are held in memory."""
    experts: Counter[StorageFormat] = Counter()
    others: Counter[StorageFormat] = Counter()
    for ours, form in _forms(opened):
        (experts if ours.expert is not None else others)[form] += prod(ours.shape)
    found = _scheme_like(max(experts + others, key=(experts + others).__getitem__))
    plain = bool(experts) and max(others, key=others.__getitem__).codes is None
    return msgspec.structs.replace(found, only_experts=plain and found.bits < 16)  # e.g. MXFP4 checkpoints with bf16 attention


def _scheme_like(form: StorageFormat) -> Scheme:
    if form.codes is None:
        return scheme("fp32" if form.dense is torch.float32 else "bf16")
    if form.codes.kind == "fp8":
        return scheme("fp8")
    if form.codes.kind in FORMS:
        return _scheme_of_bits(held_bits(form.name))
    group = form.codes.group if form.codes.group in GROUPS else max(GROUPS)
    return scheme("int8" if form.codes.kind == "int8" else "int4", group, zero_points=form.codes.kind == "int4_zeros")


def _scheme_of_bits(bits: float) -> Scheme:
    """About as many bits per weight, scales included."""
    return scheme("int4", 128 if bits <= 4.125 else 32) if bits <= 5 else scheme("int8", 128)


def _forms(opened: OpenedModel) -> Iterator[tuple[ModelTensor, StorageFormat]]:
    """Of the layers' matrices; embedding and head are split by rows, so groups do not matter."""
    locations, spec = opened.locations or locate_tensors(opened.rules, opened.store), opened.spec
    experts = (0, spec.experts.num_experts) if spec.experts else None
    forms = StorageFormats(opened.store)
    for ours in TensorIndex(opened.rules).held(spec, (0, spec.num_layers), experts):
        if ours.layer is None or len(ours.shape) < 2:
            continue
        if ours.name not in locations:
            raise missing_tensor(ours)
        yield ours, forms.of(ours, locations[ours.name])
