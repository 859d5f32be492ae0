"""OpenAI's Responses API: bodies to chats, Deltas to items and events."""
