"""The router as a Client: fallback, breakers, sticky conversations, cache, log, drift."""
