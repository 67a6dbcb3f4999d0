"""The files of the campaigns have a few KB: threads take part in reading and writing them all the same."""

from __future__ import annotations

from typing import Any

from automodel_ckpt.checkpoint.formats import read_ahead, reading
from automodel_ckpt.checkpoint.jobs import checksums, jobs

_NUM_THREADS = 3
_BLOCK_BYTES = 256
_LIMITS: dict[Any, dict[str, Any]] = {
    read_ahead: {"BLOCK_BYTES": _BLOCK_BYTES, "_SERIAL_ELEMENTS": 5},
    reading: {
        "BLOCK_BYTES": _BLOCK_BYTES,
        "_LARGE_RUN_BYTES": 1,
        "num_threads": lambda nbytes: _NUM_THREADS,
    },
    checksums: {"_PARALLEL_FROM_BYTES": 8, "_PIECE_BYTES": 64},
    jobs: {
        "_THREADS_FROM_BYTES": 1,
        "_AHEAD_BYTES": 512,
        "_AHEAD_CHUNKS": 3,
        "num_threads": lambda: _NUM_THREADS,
    },
}


def use_threads() -> None:
    """Read and write small files in this process as large ones: in several blocks, with threads. Not in its writer."""
    for module, values in _LIMITS.items():
        for name, value in values.items():
            assert hasattr(module, name)
            setattr(module, name, value)
