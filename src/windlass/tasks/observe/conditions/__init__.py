"""Conditions as values: computed over our own history, written as PromQL for Prometheus. Nothing is parsed."""
