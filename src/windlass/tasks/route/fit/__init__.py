"""Fitting a router to a table, with cross-validation."""
