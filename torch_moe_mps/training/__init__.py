"""Training of LoRA adapters: examples of a file, what memory a step takes, the steps, and their curve."""
