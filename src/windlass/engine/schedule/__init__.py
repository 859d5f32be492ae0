"""Which tokens the next step computes, and which KV blocks hold them. Pure."""
