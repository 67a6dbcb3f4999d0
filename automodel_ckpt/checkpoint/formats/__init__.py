"""The model formats: one interface, two backends.

PyTorch DCP plans who writes and reads what (:mod:`planning`); a format lays a rank's share out in files and says where
each slice's raw bytes stand (``write(share, staging) -> TreePart``); what was written is read back by slices, whatever
the format (:mod:`reading`).
"""
