"""Answers that models gave, as one table of prompts and models."""
