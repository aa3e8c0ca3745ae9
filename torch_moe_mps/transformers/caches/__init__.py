"""What models keep of the tokens so far: the layers of their caches, the memory of these, kept prompts."""
