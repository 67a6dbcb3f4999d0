"""The verbs of ``ckpt``, one module each."""
