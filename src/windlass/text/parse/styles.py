"""The ways in which models set reasoning and calls apart, by name, and the marks that they use. Knows no model."""

from __future__ import annotations

from windlass.text.parse import tool_calls as tools

PLAIN = "plain"
"""All is content."""
TAGS = "tags"
"""Reasoning between tags. The styles named after a form of tool call have it too."""
CHANNELS = "channels"
"""Messages with headers that say whom they are for: <|channel|>analysis<|message|>...<|end|>."""
BARE_JSON = "bare_json"
"""An answer that is a JSON object with a name and parameters is a call."""
BRACKETS = ("bracket_list", "bracket_args")
"""[TOOL_CALLS] and then a JSON list, or a name, [ARGS] and a JSON object."""
STYLES = (PLAIN, TAGS, *tools.FORMS, *BRACKETS, BARE_JSON, CHANNELS)

THINK = ("<think>", "</think>")
_BRACKET_THINK = ("[THINK]", "[/THINK]")
CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
BRACKET_MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
PYTHON_TAG = "<|python_tag|>"


def style_tags(style: str) -> tuple[str, str]:
    """Around reasoning."""
    return _BRACKET_THINK if style in BRACKETS else THINK


def style_marks(style: str) -> tuple[str, ...]:
    """What is looked for in the text, though it may be a special token, which is no text otherwise."""
    if style == PLAIN:
        return ()
    if style == CHANNELS:
        return CHANNEL_MARKS
    if style in BRACKETS:
        return (*_BRACKET_THINK, *BRACKET_MARKS)
    if style == BARE_JSON:
        return (*THINK, PYTHON_TAG)
    return (*THINK, *(tools.MARKERS if style in tools.FORMS else ()))
