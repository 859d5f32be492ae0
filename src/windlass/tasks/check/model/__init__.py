"""Verdicts on a model's files, on what it generates, and how long work with it takes."""
