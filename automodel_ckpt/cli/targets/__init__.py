"""The values of ``ckpt export --to``: one module per target, with a value ``TARGET``. Imports no torch."""
