"""GGUF files: architectures, tokenizers and tensor types."""
