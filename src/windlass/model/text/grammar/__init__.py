"""Grammars for constrained decoding of answers and tool calls, as text for llguidance."""
