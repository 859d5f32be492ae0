"""Text to tokens and back, and chats to text. Knows tokenizers and templates, no model and no weights."""
