"""Request bodies to core Requests, Deltas to response bodies."""
