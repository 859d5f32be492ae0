"""What running takes: speed against what this machine can do, memory against what was planned. `windlass bench`.

Measures through the engine that serves. Knows no plan: who calls brings the prediction along.
"""
