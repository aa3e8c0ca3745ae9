"""Images and audio of requests: limits, fetching, decoding."""
