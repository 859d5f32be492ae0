"""Conversion to Distributed Llama's `.m` and `.t` files."""
