"""Checkpoints in one compressed file (``ckpt archive``), and back, bit for bit (``ckpt unarchive``)."""
