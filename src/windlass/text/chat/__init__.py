"""Chats to text: templates, and which spans are the assistant's."""
