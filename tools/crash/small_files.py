"""The files of the campaigns have a few KB: threads take part in reading them all the same."""

from __future__ import annotations

from typing import Any

from automodel_ckpt.checkpoint.formats import read_ahead, reading

_NUM_THREADS = 3
_BLOCK_BYTES = 256
_LIMITS: dict[Any, dict[str, Any]] = {
    read_ahead: {"BLOCK_BYTES": _BLOCK_BYTES, "_SERIAL_ELEMENTS": 5},
    reading: {
        "BLOCK_BYTES": _BLOCK_BYTES,
        "_LARGE_RUN_BYTES": 1,
        "num_threads": lambda nbytes: _NUM_THREADS,
    },
}


def use_threads() -> None:
    """Read small files in this process as large ones: in several blocks, with threads."""
    for module, values in _LIMITS.items():
        for name, value in values.items():
            assert hasattr(module, name)
            setattr(module, name, value)
