"""`windlass version`, `devices`, `completion`, `ps` and `stop`: what is installed, known and running."""
