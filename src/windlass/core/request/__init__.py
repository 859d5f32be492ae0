"""Requests to a Client and its results. Values only: knows no engine, no tokenizer, no HTTP."""

from windlass.core.request.constraint import Constraint, ConstraintKind
from windlass.core.request.info import DeviceMemory, Info, Stats
from windlass.core.request.limits import PRIORITIES, shown_integer
from windlass.core.request.request import ADDRESS, NO_EFFORT, EmbedRequest, Pooling, Request, ScoreRequest, tool_name
from windlass.core.request.results import (
    CallPiece,
    Delta,
    Embedding,
    FinishReason,
    Scores,
    Timings,
    TokenLogprob,
    ToolCall,
    Usage,
)
from windlass.core.request.sampling import GREEDY, Sampling

__all__ = [
    "ADDRESS",
    "GREEDY",
    "NO_EFFORT",
    "PRIORITIES",
    "CallPiece",
    "Constraint",
    "ConstraintKind",
    "Delta",
    "DeviceMemory",
    "EmbedRequest",
    "Embedding",
    "FinishReason",
    "Info",
    "Pooling",
    "Request",
    "Sampling",
    "ScoreRequest",
    "Scores",
    "Stats",
    "Timings",
    "TokenLogprob",
    "ToolCall",
    "Usage",
    "shown_integer",
    "tool_name",
]
