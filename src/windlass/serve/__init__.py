"""Over HTTP, as OpenAI's API: the application, its guards, its numbers. Knows a Client and no engine. No torch."""
