"""The HTTP server: OpenAI's and Anthropic's protocols."""
