"""Formats of reasoning and tool calls, by chat template. Data."""
