"""The rules evaluated by ourselves, and alerts that reach people without Alertmanager."""
