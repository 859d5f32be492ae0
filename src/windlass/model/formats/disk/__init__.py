"""Files on disk: atomic writes, journals, shared file handles, positional reads."""
