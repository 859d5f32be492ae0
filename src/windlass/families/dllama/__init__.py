"""Distributed Llama's description of a model: header and tensor names."""
