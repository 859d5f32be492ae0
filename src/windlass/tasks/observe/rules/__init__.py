"""Alert rules and recording rules, made from the vocabulary of metrics. Each has a case that fires and one that does not in tests/tasks/observe."""
