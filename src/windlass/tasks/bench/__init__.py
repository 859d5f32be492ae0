"""Benchmarks (`windlass bench`): speed against the limits of this machine, memory against the plan.

Measures the serving engine itself. Knows no planner: the caller passes the prediction.
"""
