"""The scheduler: which tokens the next step computes, and in which KV blocks. Pure."""
