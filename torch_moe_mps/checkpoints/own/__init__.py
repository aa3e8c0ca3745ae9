"""Our own layout: what the config of a checkpoint says."""
