"""Tokenizers, of Hugging Face directories and of GGUF files."""
