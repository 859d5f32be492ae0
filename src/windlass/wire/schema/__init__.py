"""The structs of OpenAI's API: requests, responses, chunks, errors."""
