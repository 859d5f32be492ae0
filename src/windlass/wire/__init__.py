"""OpenAI's API as values, for servers and clients. Knows no HTTP server and no engine.

`decode` turns a body into a struct or names the wrong parameter; `server/requests` turns it into core Requests, and
`server/responses` Deltas into chunks and responses. `client/` is the reverse: `client/http_client` is a core Client over HTTP.
"""
