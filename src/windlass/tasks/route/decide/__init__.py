"""Decisions over frozen values: before an answer, after it, and in which order models are loaded."""
