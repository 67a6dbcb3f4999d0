"""``make interop``: real programs write checkpoints that this program reads, and read what it writes.

One module per program, with a function ``checks`` (table.py lists them). Environments and files are in ``.peers``.
"""
