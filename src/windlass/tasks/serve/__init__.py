"""The HTTP server: OpenAI-compatible API, admission, supervision, metrics. Knows a Client and no engine. No torch."""
