"""Any OpenAI-compatible server as a Client."""
