"""`windlass bench --served`: speed of a server as its clients see it, over HTTP."""
