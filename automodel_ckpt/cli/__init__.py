"""The commands `ckpt-train` and `ckpt`."""
