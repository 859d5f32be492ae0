"""What is happening, what it costs, what is about to go wrong: exporter, rules, history, alerts, dashboards, energy, `windlass top`.

Knows metrics by name (`core/metrics/`) and no server, engine or trainer: it scrapes them.
"""
