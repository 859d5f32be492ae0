"""GGUF's description of a model: metadata to config.json, tensor names."""
