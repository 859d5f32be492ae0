"""The vocabulary: what a model, a machine, a scheme, a layout and a plan *are*. Pure values and functions, no torch."""
