"""The engine behind the API: supervisor, admission, requests in flight, merged streams."""
