"""The operator `cached_attention` in place of a model's own: masks, latents, keys that are chosen."""
