"""Output styles: how models mark reasoning and tool calls. Knows no model."""

from __future__ import annotations

from windlass.model.text.parse import tool_calls as tools

PLAIN = "plain"
"""Content only."""
TAGS = "tags"
"""Reasoning between tags, as in all styles with tool calls below."""
CHANNELS = "channels"
"""Messages with channel headers: <|channel|>analysis<|message|>...<|end|>."""
BARE_JSON = "bare_json"
"""Output that is a JSON object with name and parameters is a call."""
BRACKETS = ("bracket_list", "bracket_args")
"""[TOOL_CALLS], then a JSON list, or a name, [ARGS] and a JSON object."""
STYLES = (PLAIN, TAGS, *tools.FORMS, *BRACKETS, BARE_JSON, CHANNELS)

THINK = ("<think>", "</think>")
_BRACKET_THINK = ("[THINK]", "[/THINK]")
CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
FINAL_CHANNEL = "<|channel|>final"
"""The header of the message that is the answer."""
BRACKET_MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
PYTHON_TAG = "<|python_tag|>"


def style_tags(style: str) -> tuple[str, str]:
    """The tags around reasoning."""
    return _BRACKET_THINK if style in BRACKETS else THINK


def style_marks(style: str) -> tuple[str, ...]:
    """Markers that are parsed from the text even if they are special tokens."""
    if style == PLAIN:
        return ()
    if style == CHANNELS:
        return CHANNEL_MARKS
    if style in BRACKETS:
        return (*_BRACKET_THINK, *BRACKET_MARKS)
    if style == BARE_JSON:
        return (*THINK, PYTHON_TAG)
    return (*THINK, *(tools.MARKERS if style in tools.FORMS else ()))
