"""Predicted time of decode and prefill."""
