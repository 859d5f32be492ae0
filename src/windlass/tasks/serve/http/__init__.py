"""HTTP: the connection protocol, request bodies, API keys, Host and Origin checks, error responses."""
