"""Images and audio of requests: limits and decoding."""
