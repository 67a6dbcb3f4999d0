"""Formats of other programs that are recognized, so that an error can name them, but not read. Imports no torch.

Directories are recognized by the files that their programs leave in them, single files by their first bytes. Nothing is
unpickled or unpacked.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import NamedTuple

from automodel_ckpt.checkpoint.files.safe_open import open_regular, read_safely
from automodel_ckpt.errors import CheckpointUnusable

_HEAD_BYTES = 512
_MAX_METADATA_BYTES = 1 << 16
_ITERATION = re.compile(r"(iter_[0-9]+|release)", re.ASCII)
_MEGATRON_RANK = re.compile(r"mp_rank_[0-9]{2}(_[0-9]{3})*", re.ASCII)
_CONVERT_MEGATRON = (
    "convert it to Hugging Face files with Megatron's or NeMo's own tools (Megatron Bridge, or "
    "tools/checkpoint/convert.py of Megatron-LM), and import those"
)
_UNPICKLE = (
    "it is a pickle, which can run code when it is loaded, so it is not read here. If you trust it: torch.load(path, "
    "weights_only=True), then model.load_state_dict and model.save_pretrained, or safetensors.torch.save_file; then "
    "import that"
)


class Format(NamedTuple):
    """A format that is not read: its name, and what to do."""

    name: str
    hint: str

    def error(self, path: Path) -> CheckpointUnusable:
        return CheckpointUnusable(
            f"this format cannot be read: {self.name}",
            where=str(path),
            value=path.name,
            hint=self.hint,
        )


def unsupported_directory(directory: Path) -> Format | None:
    """The format of a directory that is recognized and not read; None for any other.

    Known is Megatron-Core's: a run (``latest_checkpointed_iteration.txt``, ``iter_*``), one of its checkpoints
    (``metadata.json`` with ``sharded_backend``, ``common.pt``), and the older form with a directory for each rank.
    """
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return None
    backend = _sharded_backend(directory)
    if backend is not None or ("common.pt" in names and ".metadata" in names):
        kind = f" ({backend})" if backend else ""
        return Format(f"a distributed checkpoint of Megatron-Core{kind}", _CONVERT_MEGATRON)
    if "latest_checkpointed_iteration.txt" in names and any(
        _ITERATION.fullmatch(name) for name in names
    ):
        return Format("a run of Megatron-LM", _CONVERT_MEGATRON)
    if any(_MEGATRON_RANK.fullmatch(name) and (directory / name).is_dir() for name in names):
        return Format("a checkpoint of Megatron-LM, a directory for each rank", _CONVERT_MEGATRON)
    # NeMo 2 keeps Megatron-Core's in weights/, beside context/.
    if (
        "weights" in names
        and "context" in names
        and _sharded_backend(directory / "weights") is not None
    ):
        return Format("a checkpoint of NeMo 2 (Megatron-Core)", _CONVERT_MEGATRON)
    return None


def _sharded_backend(directory: Path) -> str | None:
    """``torch_dist`` or ``zarr``, where metadata.json is Megatron-Core's."""
    try:
        value = json.loads(read_safely(directory, "metadata.json", limit=_MAX_METADATA_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    backend = value.get("sharded_backend") if isinstance(value, dict) else None
    return backend[:40] if isinstance(backend, str) else None


def file_format(path: Path) -> Format | None:
    """The format of a single file by its content; None for what looks like a safetensors file, which can be read.

    Raises OSError.
    """
    descriptor = open_regular(Path(os.path.realpath(path)))
    try:
        head = os.pread(descriptor, _HEAD_BYTES, 0)
    finally:
        os.close(descriptor)
    if head[:4] == b"GGUF":
        hint = (
            "import the Hugging Face files that it was made from; or load it with transformers "
            "(from_pretrained(..., gguf_file=...)), save_pretrained, and import that"
        )
        return Format("GGUF, a file for llama.cpp", hint)
    if head[:4] == b"PK\x03\x04":
        return _zip_format(head)
    if head[:2] == b"\x1f\x8b" or head[257:262] == b"ustar":
        hint = (
            "if it is a .nemo file: convert it to Hugging Face files with NeMo's own scripts; otherwise unpack it "
            "(tar), and import the directory"
        )
        return Format("a tar archive, such as a .nemo file", hint)
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return Format("a pickle, such as torch.save wrote before PyTorch 1.6", _UNPICKLE)
    if head[:8] == b"\x89HDF\r\n\x1a\n":
        return Format(
            "HDF5, as Keras writes",
            "load it with the program that wrote it, and save it as safetensors",
        )
    if path.suffix == ".safetensors" or head[8:9] == b"{":
        return None  # whether it is a whole one, its reader finds out
    return Format(
        "unknown", "use a directory of *.safetensors or of PyTorch DCP, or a .safetensors file"
    )


def _zip_format(head: bytes) -> Format:
    """What an archive is, by the name of its first entry (source: the zip format's local file header)."""
    length = int.from_bytes(head[26:28], "little")
    first = head[30 : 30 + length].decode(errors="replace")
    if first.endswith((".npy", ".npz")):
        return Format(
            "an archive of NumPy arrays",
            "save its arrays with safetensors.numpy.save_file, and import that",
        )
    if first.rpartition("/")[2] in (
        "data.pkl",
        "byteorder",
        ".format_version",
        "version",
        ".storage_alignment",
    ):
        return Format("an archive of torch.save (.pt, .pth, .bin, .ckpt)", _UNPICKLE)
    return Format("a zip archive", "unpack it, and import the directory of the model's files")
