"""The embedded engine: scheduler, KV blocks, runner, sampler, and the client in front of it.

client/ and all that it imports is free of torch: the engine runs in a process of its own.
"""
