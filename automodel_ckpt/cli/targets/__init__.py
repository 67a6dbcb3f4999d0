"""The values of ``ckpt export --to``: a table of targets. Imports no torch."""
