"""The model formats: one interface, three backends.

PyTorch DCP plans who writes and reads what (:mod:`~automodel_ckpt.checkpoint.formats.planning`); a format lays a rank's
share out in files and says where each slice's raw bytes will stand (``plan_jobs``). Writing is the jobs' own affair
(:mod:`automodel_ckpt.checkpoint.writing.jobs`); what was written is read back by slices, whatever the format
(:mod:`~automodel_ckpt.checkpoint.formats.reading`).
"""
