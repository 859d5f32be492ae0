"""The structs of OpenAI's API."""
