"""The HTTP server: OpenAI's API, its page, metrics, and servers over several ranks."""
