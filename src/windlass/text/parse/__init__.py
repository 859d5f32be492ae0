"""A model's text as it arrives: reasoning, tool calls, stop strings."""
