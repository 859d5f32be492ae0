"""GGUF metadata and tensor names -> their Hugging Face equivalents."""
