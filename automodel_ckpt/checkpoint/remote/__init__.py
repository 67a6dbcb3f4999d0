"""Checkpoints in object stores: ``s3://``, ``gs://``, ``az://`` and other URLs of fsspec. Imports no torch.

``url`` checks URLs, ``store`` reads and writes objects, ``conditional`` has its writes that depend on the version of an
object, ``multipart`` uploads files to S3, ``run`` has the names of a run's objects and the protocol that makes a remote
checkpoint complete or absent, ``push`` and ``pull`` copy checkpoints, ``transfer`` limits and records what they send,
``transient`` repeats reads, ``uploader`` is the process that uploads during training, and ``background`` starts it.
"""
