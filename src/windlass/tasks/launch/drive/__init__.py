"""Submits, watches and cancels jobs: one file a scheduler, with the parsing of its answers as pure functions."""
