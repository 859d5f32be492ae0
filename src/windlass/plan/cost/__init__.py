"""Prices, dollars and carbon."""
