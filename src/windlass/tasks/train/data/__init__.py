"""Text to token shards (`prepare`, no torch), and token shards to batches (`batches`). Knows no model."""
