"""`POST /v1/embeddings` and `/v1/rerank`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from windlass.wire.schema.structs import Count, Natural, RequestStruct, ResponseStruct


class EmbeddingRequest(RequestStruct, kw_only=True):
    model: str = ""
    input: str | dict[str, Any] | list[str | Natural | list[str | Natural] | dict[str, Any]]
    """A text, or a list of texts. A text is a string, a list of token ids (and strings between them), or, as llama.cpp has it, an object
    with `prompt_string` or with `content` of text parts."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    """The first so many, normalized again."""
    pooling: Literal["last", "mean"] | None = None
    """Windlass only: the last token's hidden state (the default), or the mean."""
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    """Rejected: inputs are never truncated."""


class EmbeddingEntry(ResponseStruct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(ResponseStruct):
    prompt_tokens: int = 0
    total_tokens: int = 0


class EmbeddingResponse(ResponseStruct, kw_only=True):
    object: str = "list"
    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage


class RerankRequest(RequestStruct, kw_only=True):
    model: str = ""
    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | dict[str, Any]], Meta(min_length=1)] | None = None
    """Strings, or objects with `text`."""
    texts: Annotated[list[str], Meta(min_length=1)] | None = None
    """Instead of `documents`: the request of Text Embeddings Inference (TEI), and then so is the response."""
    return_text: bool | None = None
    """TEI's `return_documents`."""
    raw_scores: bool | None = None
    """Rejected if true: there is no score before the exponential."""
    truncate: bool | None = None
    """Rejected if true, like `max_tokens_per_doc`."""
    top_n: Count | None = None
    return_documents: bool | None = None
    user: str | None = None
    max_tokens_per_doc: int | None = None
    """Rejected: documents are never truncated."""


class RerankResult(ResponseStruct, kw_only=True):
    index: int
    relevance_score: float
    document: dict[str, str] | UnsetType = UNSET


class TeiRank(ResponseStruct, kw_only=True):
    """Of Text Embeddings Inference, which answers with a list of them."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class RerankResponse(ResponseStruct, kw_only=True):
    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage
