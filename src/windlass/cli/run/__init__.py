"""`windlass run`: one answer, or a chat in the terminal."""
