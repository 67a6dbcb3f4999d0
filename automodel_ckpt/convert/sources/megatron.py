"""Checkpoints of Megatron-LM, Megatron-Core and NeMo 2: recognized, and not read. Imports no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path

from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.convert.sources.files import names_in
from automodel_ckpt.convert.sources.format import UnsupportedFormat

_MAX_METADATA_BYTES = 1 << 16
_ITERATION = re.compile(r"(iter_[0-9]+|release)", re.ASCII)
_RANK = re.compile(r"mp_rank_[0-9]{2}(_[0-9]{3})*", re.ASCII)


class _Megatron(UnsupportedFormat):
    hint = (
        "convert it to Hugging Face files with Megatron's or NeMo's own tools (Megatron Bridge, or "
        "tools/checkpoint/convert.py of Megatron-LM), and import those"
    )


class MegatronCore(_Megatron):
    """A distributed checkpoint: ``metadata.json`` with ``sharded_backend``, or ``common.pt`` beside ``.metadata``."""

    name = "a distributed checkpoint of Megatron-Core"

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        names = names_in(path)
        if "common.pt" in names and ".metadata" in names:
            return True
        return _sharded_backend(path) is not None

    def describe(self, path: Path) -> str:
        backend = _sharded_backend(path)
        if backend is None:
            return self.name
        return f"{self.name} ({backend})"


class MegatronRun(_Megatron):
    """A run: ``latest_checkpointed_iteration.txt`` and the directories of its checkpoints."""

    name = "a run of Megatron-LM"

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        names = names_in(path)
        if "latest_checkpointed_iteration.txt" not in names:
            return False
        return any(_ITERATION.fullmatch(name) for name in names)


class MegatronRanks(_Megatron):
    """The older form: a directory ``mp_rank_XX`` for each rank."""

    name = "a checkpoint of Megatron-LM, a directory for each rank"

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        rank_names = filter(_RANK.fullmatch, names_in(path))
        return any((path / name).is_dir() for name in rank_names)


class Nemo2(_Megatron):
    """A checkpoint of NeMo 2: Megatron-Core's in ``weights/``, beside ``context/``."""

    name = "a checkpoint of NeMo 2 (Megatron-Core)"

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        names = names_in(path)
        if "weights" not in names or "context" not in names:
            return False
        return _sharded_backend(path / "weights") is not None


def _sharded_backend(directory: Path) -> str | None:
    """Return ``torch_dist`` or ``zarr`` from the metadata.json of Megatron-Core; None if it is not there."""
    try:
        value = json.loads(read_safely(directory, "metadata.json", limit=_MAX_METADATA_BYTES))
    # Deeply nested JSON raises RecursionError.
    except (OSError, ValueError, RecursionError):
        return None
    backend = value.get("sharded_backend") if isinstance(value, dict) else None
    if not isinstance(backend, str):
        return None
    return backend[:40]
