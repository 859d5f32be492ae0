"""HTTP itself: connections, bodies, headers, keys, origins, error responses."""
