"""LoRA training: examples from a file, the predicted peak of memory, training steps, and the loss curve."""
