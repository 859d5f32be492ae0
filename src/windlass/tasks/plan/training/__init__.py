"""Planning of training runs: model states, activations, step time, checkpoints and the search over layouts."""
