"""Text to token shards (`prepare`), and token shards to batches (`batches`). Preparing imports no torch; nothing here knows a model."""
