"""Documents to token shards, with a quality report. No torch."""
