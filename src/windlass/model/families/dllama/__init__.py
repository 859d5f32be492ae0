"""Distributed Llama headers and tensor order."""
