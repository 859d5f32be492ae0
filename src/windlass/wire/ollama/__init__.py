"""Ollama's API: bodies to chats, Deltas to lines of JSON."""
