"""vLLM as the engine behind our server."""
