"""Writes GGUF files, for llama.cpp and everything built on it."""
