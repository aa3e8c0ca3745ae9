"""GGUF files, and the files of importance that llama.cpp writes as GGUF."""
