"""The training half of the planner: states, activations, step time, checkpoints and the search over layouts."""
