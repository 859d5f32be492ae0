"""Mixture-of-experts families, one file each."""
