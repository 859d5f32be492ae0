"""The last day, kept by ourselves: samples in memory and in one bounded file, for machines without Prometheus."""
