"""Images and sound of requests: limits, fetching, decoding."""
