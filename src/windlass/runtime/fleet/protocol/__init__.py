"""The authenticated connection between root and worker: secret, handshake, signed frames, messages."""
