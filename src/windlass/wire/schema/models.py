"""`GET /v1/models`."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from windlass.core.request import Info
from windlass.wire.schema.structs import ResponseStruct

OWNER = "windlass"


class ModelCard(ResponseStruct):
    id: str
    object: str = "model"
    created: int | float = 0
    owned_by: str = OWNER
    max_model_len: int | UnsetType | None = UNSET
    """Context length; vLLM's name for it."""
    state: str | UnsetType | None = UNSET
    """In a server of several models: unloaded, loading, loaded, leaving (it finishes what runs) or unloading."""
    parent: str | UnsetType | None = UNSET
    """Of a LoRA adapter: its base model; vLLM's name for it."""
    embedding_pooling: str | UnsetType | None = UNSET
    """How /v1/embeddings pools hidden states unless a request says otherwise."""


class ModelList(ResponseStruct):
    object: str = "list"
    data: list[ModelCard] = []


def model_card(info: Info, created: int, name: str = "") -> ModelCard:
    return ModelCard(id=name or info.model, created=created, max_model_len=info.context_tokens, embedding_pooling="last")
