"""Grafana dashboards made from the vocabulary, so that no panel asks for a metric that does not exist."""
