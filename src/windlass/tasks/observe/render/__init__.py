"""Files for Prometheus, Alertmanager and Grafana. Pure: values in, text out."""
