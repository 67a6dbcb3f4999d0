"""Export targets: one module per format that ``ckpt export --to`` writes. Imports no torch at import time."""
