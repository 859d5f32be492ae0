"""Grammars that constrain answers and tool calls, as text for llguidance."""
