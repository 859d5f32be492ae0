"""Chat templates, and the assistant's spans in rendered text."""
