"""Metrics of a run: live line, JSONL, TensorBoard, Prometheus, plot, profile."""

from windlass.tasks.train.logging.fan_out import MetricsLogger, Sink, StepMetrics

__all__ = ["MetricsLogger", "Sink", "StepMetrics"]
