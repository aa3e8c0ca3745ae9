"""GGUF files: their headers, their tensors, and what stays packed."""
