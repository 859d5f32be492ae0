"""Anthropic's Messages API: bodies to chats, Deltas to content blocks and events."""
