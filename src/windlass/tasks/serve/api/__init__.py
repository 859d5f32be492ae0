"""The routes: requests in, answers out, middleware, OpenAPI, status."""
