"""The model formats: one interface, two backends.

PyTorch DCP plans who writes and reads what (:mod:`planning`); a format lays a rank's share out in files and says where
each slice's raw bytes will stand (``plan_jobs``). Writing is the jobs' own affair
(:mod:`automodel_ckpt.checkpoint.jobs`); what was written is read back by slices, whatever the format (:mod:`reading`).
"""
