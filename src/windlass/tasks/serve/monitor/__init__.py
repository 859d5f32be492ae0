"""Metrics, rolling numbers, log lines, how busy the machine is."""
