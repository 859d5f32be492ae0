"""Windlass lifts heavy weights: plan, convert, run, serve, evaluate, route and train large open-weight language models."""

__version__ = "0.1.0"
