"""vLLM started from a Plan: flags, checks, installation, process, metrics."""
