"""Models of transformers, from pretrained weights or from a configuration."""
