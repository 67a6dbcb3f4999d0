"""``ckpt generate`` and ``ckpt chat``: a model from a path, and its answers."""
