"""`windlass check`: will it work, and how long will it take."""
