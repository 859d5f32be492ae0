"""What a run shows of itself: a live line, JSONL, TensorBoard, Prometheus, a plot, a profile."""

from windlass.train.logging.fan_out import Sample, Sink, Watch

__all__ = ["Sample", "Sink", "Watch"]
