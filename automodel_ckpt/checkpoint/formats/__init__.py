"""The model formats: one interface, three formats.

All ranks compute who writes what (:mod:`~automodel_ckpt.checkpoint.formats.planning`). A format plans the
files of a rank's share and the position of each slice's raw bytes (``plan_jobs``). The jobs write them
(:mod:`automodel_ckpt.checkpoint.jobs.jobs`). What was written is read back by slices, whatever the format
(:mod:`~automodel_ckpt.checkpoint.formats.reading`).
"""
