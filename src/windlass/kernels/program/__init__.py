"""A decoder's native calls recorded once and replayed."""
