"""Runs generated programs where they can do no harm."""
