"""Streaming parsers of model output: reasoning, tool calls, stop strings."""
