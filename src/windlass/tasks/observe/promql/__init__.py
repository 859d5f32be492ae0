"""The part of PromQL that our rules use, so that one machine without Prometheus evaluates the same rules."""
