"""Optimizers, learning-rate schedules, fp32 master weights."""
