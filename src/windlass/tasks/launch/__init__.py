"""From a Plan to running processes: ssh and vLLM. A pure `render` makes the command; the rest runs it."""
