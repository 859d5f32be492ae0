"""From one checkpoint to another: formats joined with what a family knows. Reads rows, writes rows, holds no model."""
