"""Ollama's requests. Options that only say how its own engine uses the hardware are accepted without effect."""

from __future__ import annotations

from typing import Any, Literal

from windlass.wire.schema.structs import Count, RequestStruct, ResponseStruct


class OllamaFunction(RequestStruct):
    name: str
    arguments: dict[str, Any] = {}
    index: int | None = None
    description: str | None = None


class OllamaCall(RequestStruct):
    function: OllamaFunction
    id: str | None = None
    type: str | None = None


class OllamaMessage(RequestStruct):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaTool(RequestStruct):
    function: dict[str, Any]
    type: str | None = None


class OllamaOptions(RequestStruct):
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    num_predict: int | None = None
    """Negative: no limit."""
    num_ctx: int | None = None
    """Rejected if the model's context is smaller."""
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Without effect; a header names them.
    repeat_last_n: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    vocab_only: bool | None = None
    penalize_newline: bool | None = None
    # Rejected unless neutral.
    mirostat: int | None = None
    mirostat_eta: float | None = None
    mirostat_tau: float | None = None
    tfs_z: float | None = None
    typical_p: float | None = None


class OllamaRequest(RequestStruct, kw_only=True):
    model: str
    stream: bool | None = None
    """True unless false."""
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    keep_alive: Any = None
    """Ignored: the model stays loaded."""
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None
    shift: bool | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: list[OllamaMessage] = []
    tools: list[OllamaTool] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[Any] | None = None


class OllamaModelRequest(RequestStruct):
    """`/api/show` and `/api/pull`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    stream: bool | None = None
    insecure: bool | None = None


class OllamaEmbedRequest(RequestStruct, kw_only=True):
    model: str
    input: str | list[str]
    dimensions: Count | None = None
    truncate: bool | None = None
    """Rejected if true: inputs are never truncated."""
    options: OllamaOptions | None = None
    keep_alive: Any = None


class OllamaErrorBody(ResponseStruct):
    error: str
