"""The server side: request bodies to core Requests, Deltas to response bodies."""
