"""One server: how it is asked, and what it answers."""
