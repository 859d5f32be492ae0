"""Parts of a checkpoint on their way to another machine. No torch."""
