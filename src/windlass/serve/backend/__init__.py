"""The engine behind the routes: supervisor, admission, requests in flight, merged streams."""
