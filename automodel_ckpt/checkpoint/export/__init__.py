"""From described tensors to the files that other programs load: Hugging Face's, merged adapters, GGUF."""
