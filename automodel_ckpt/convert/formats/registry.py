"""The external formats, in order of precedence. A new format is a module of this package and an entry in FORMATS."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from automodel_ckpt.base.other_weights import POINTER
from automodel_ckpt.checkpoint.parts.manifest import has_manifest
from automodel_ckpt.convert.formats.files import first_bytes, names_in
from automodel_ckpt.convert.formats.format import Format

_HEAD_BYTES = 512
_ZIP = rb"PK\x03\x04"
_TAR = rb"\x1f\x8b|(?s:.{257})ustar"
_SHARDS = r".*\.safetensors"


class Row(NamedTuple):
    """A format, a class or an instance at *place*, and when it is asked.

    Its module is imported if a name in a directory, or the name of a file, matches *names*, or the first bytes of a
    file match *head*. Then :meth:`Format.detect` decides.
    """

    place: str
    names: str | None = None
    head: bytes | None = None


FORMATS = (
    # Directories. Megatron-Core's also contain .metadata, like PyTorch DCP's.
    # A model of NeMo can have a directory for each rank, as Megatron-LM's.
    Row("nemo.nemo:NemoDirectory", r"model_config\.yaml"),
    Row("nemo.megatron:MegatronCore", r"common\.pt|metadata\.json"),
    Row("nemo.megatron:MegatronRun", r"latest_checkpointed_iteration\.txt"),
    Row("nemo.megatron:MegatronRanks", r"mp_rank_\d\d(_\d{3})*"),
    Row("nemo.megatron:Nemo2", r"context"),
    # Hugging Face files or an adapter, next to the training state.
    Row("trainer:TransformersTrainer", r"trainer_state\.json"),
    Row("hugging_face:PeftAdapter", r"adapter_model\.safetensors"),
    # A run of transformers' Trainer with DeepSpeed also has model.safetensors: these are the same weights, rounded.
    Row("deepspeed:DeepSpeed", r"latest(_universal)?|.*_(model|optim)_states\.pt"),
    # A directory of PyTorch DCP, too.
    Row("lightning:LightningDistributed", r"meta\.pt"),
    # A checkpoint of the Trainer with FSDP can have model.safetensors, too.
    Row("trainer:AccelerateFsdp", r"pytorch_model_fsdp.*"),
    Row("torch.dcp:PyTorchDcp", r"\.metadata"),
    # It also has config.json and *.safetensors.
    Row("nemo.tensorrt_llm:TensorRtLlmDirectory", r"rank0\.safetensors"),
    # Both are recognized by *.safetensors: first the one that looks into a header.
    Row("hugging_face:HuggingFaceFiles", _SHARDS + r"(\.index\.json)?"),
    Row("safetensors_shards:SafetensorsShards", _SHARDS),
    # Older than safetensors: a directory often has the model in both, and safetensors has digests here.
    Row("torch.torch_files:TorchModelDirectory", r"pytorch_model\.bin(\.index\.json)?"),
    # The oldest of the formats that one directory can have, as BERT's directory does: a directory, or an index file.
    Row("tensorflow.tensorflow:TensorFlowCheckpoint", r".*\.index"),
    Row("unsupported_files:VerlShards", r"model_world_size_\d+_rank_\d+\.pt"),
    # Beside lit_model.pth, there can be the Hugging Face files that it was made from.
    Row("unsupported_files:LitGptModel", r"lit_model\.pth"),
    Row("unsupported_files:OtherWeights", r".*"),
    # Single files. The first bytes count more than the suffix .safetensors.
    Row("gguf.gguf_file:GgufFile", head=rb"GGUF"),
    Row("unsupported_files:NumpyArchive", head=_ZIP),
    Row("lightning:LightningFile", head=_ZIP),
    Row("torch.torch_files:TorchFile", head=_ZIP),
    Row("unsupported_files:ZIP", head=_ZIP),
    Row("nemo.nemo:NemoFile", head=_TAR),
    Row("nemo.tensorrt_llm:QnemoFile", head=_TAR),
    Row("unsupported_files:TAR", head=_TAR),
    Row("unsupported_files:PICKLE", head=rb"\x80[\x02-\x05]"),
    Row("unsupported_files:HDF5", head=rb"\x89HDF\r\n\x1a\n"),
    Row("unsupported_files:LFS_POINTER", head=re.escape(POINTER)),
    Row("hugging_face:SafetensorsFile", head=rb""),
    Row("unsupported_files:UNKNOWN", head=rb""),
)
_RUN = Row("automodel:AutoModel", r"optim")


@functools.cache
def _format_at(place: str) -> Format:
    module, _, name = place.partition(":")
    found = getattr(import_module(f"automodel_ckpt.convert.formats.{module}"), name)
    known: Format = found() if isinstance(found, type) else found
    return known


def detect_run(path: Path) -> Format | None:
    """Return the format of the training state in *path*, or None when no format recognizes it.

    :func:`detect` returns the same format, except for a checkpoint with parts that have a format each. Such a
    checkpoint is shown as its parts, and its weights are the weights of one part.
    """
    return detect_parts(path) or detect(path, readable_only=True)


def detect_parts(path: Path) -> Format | None:
    """Return the format of a checkpoint with parts that have a format each, or None when *path* is not one."""
    return next(_recognized(path, [_RUN]), None)


def detect(path: Path, *, readable_only: bool = False) -> Format | None:
    """Return the first format that recognizes the directory or file *path*, or None when there is none.

    With *readable_only*, formats that are only recognized are skipped. Raises OSError for a file that cannot be read.
    """
    for known in _recognized(path, FORMATS):
        if known.is_readable or not readable_only:
            return known
    return None


def _recognized(path: Path, rows: Iterable[Row]) -> Iterator[Format]:
    """Yield the formats in *rows* that recognize *path*."""
    is_file = path.is_file()
    names = [path.name] if is_file else names_in(path)
    head = first_bytes(path, _HEAD_BYTES) if is_file else None
    for row in rows:
        by_name = row.names is not None and any(re.fullmatch(row.names, name) for name in names)
        by_head = row.head is not None and head is not None and re.match(row.head, head)
        if by_name or by_head:
            known = _format_at(row.place)
            if known.detect(path):
                yield known


def formats_in(directory: Path) -> dict[str, Format]:
    """Return the readable formats of *directory* (``.``) and its subdirectories, by relative path; or of a file.

    Links to directories are not followed, and a checkpoint of this program is not an external format. A subdirectory
    that is a part of what *directory* itself contains is not listed again, and one that cannot be read is skipped.
    Empty if no format is recognized. Raises PermissionError if *directory* itself cannot be read.
    """
    parts: frozenset[str] = frozenset()
    found = {}
    if directory.is_file():
        known = detect(directory, readable_only=True)
        return {".": known} if known is not None else {}
    for name in (".", *names_in(directory)):
        path, is_inside = directory / name, name != "."
        if is_inside and (name in parts or path.is_symlink() or not path.is_dir()):
            continue
        if has_manifest(path):
            continue
        try:
            known = detect(path, readable_only=True)
        except PermissionError:
            # A directory of another user, such as lost+found, does not hide the others.
            if is_inside:
                continue
            raise
        if known is not None:
            found[name] = known
            parts = parts if is_inside else known.parts(directory)
    return found
