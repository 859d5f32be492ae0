"""How models of a family write reasoning and tool calls, by their chat template. Data."""
