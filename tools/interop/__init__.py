"""``make interop``: real programs write checkpoints that this program reads, and read what it writes.

One module per program, with a value ``PROGRAM`` (see ``program.py``). Environments and files are in ``.peers``.
"""
