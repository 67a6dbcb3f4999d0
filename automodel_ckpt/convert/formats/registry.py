"""The external formats, in order of precedence. A new format is a module of this package and an entry in FORMATS."""

from __future__ import annotations

import os
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.convert.formats.automodel import AutoModel
from automodel_ckpt.convert.formats.deepspeed import DeepSpeed
from automodel_ckpt.convert.formats.files import names_in
from automodel_ckpt.convert.formats.format import Format
from automodel_ckpt.convert.formats.gguf.gguf_file import GgufFile
from automodel_ckpt.convert.formats.hugging_face import (
    HuggingFaceFiles,
    PeftAdapter,
    SafetensorsFile,
)
from automodel_ckpt.convert.formats.lightning import LightningDistributed, LightningFile
from automodel_ckpt.convert.formats.nemo.megatron import (
    MegatronCore,
    MegatronRanks,
    MegatronRun,
    Nemo2,
)
from automodel_ckpt.convert.formats.nemo.nemo import NemoDirectory, NemoFile
from automodel_ckpt.convert.formats.nemo.tensorrt_llm import QnemoFile, TensorRtLlmDirectory
from automodel_ckpt.convert.formats.safetensors_shards import SafetensorsShards
from automodel_ckpt.convert.formats.tensorflow.tensorflow import TensorFlowCheckpoint
from automodel_ckpt.convert.formats.torch.dcp import PyTorchDcp
from automodel_ckpt.convert.formats.torch.torch_files import TorchFile, TorchModelDirectory
from automodel_ckpt.convert.formats.trainer import AccelerateFsdp, TransformersTrainer
from automodel_ckpt.convert.formats.unsupported_files import (
    HDF5,
    LFS_POINTER,
    NUMPY,
    PICKLE,
    TAR,
    UNKNOWN,
    ZIP,
    LitGptModel,
    OtherWeights,
    VerlShards,
)

DCP = PyTorchDcp()

FORMATS: tuple[Format, ...] = (
    # Directories. Megatron-Core's also contain .metadata, like PyTorch DCP's.
    # A model of NeMo can have a directory for each rank, as Megatron-LM's.
    NemoDirectory(),
    MegatronCore(),
    MegatronRun(),
    MegatronRanks(),
    Nemo2(),
    # Hugging Face files or an adapter, next to the training state.
    TransformersTrainer(),
    PeftAdapter(),
    # A run of transformers' Trainer with DeepSpeed also has model.safetensors: these are the same weights, rounded.
    DeepSpeed(),
    # A directory of PyTorch DCP, too.
    LightningDistributed(),
    # A checkpoint of the Trainer with FSDP can have model.safetensors, too.
    AccelerateFsdp(),
    DCP,
    # It also has config.json and *.safetensors.
    TensorRtLlmDirectory(),
    # Both are recognized by *.safetensors: first the one that looks into a header.
    HuggingFaceFiles(),
    SafetensorsShards(),
    # Older than safetensors: a directory often has the model in both, and safetensors has digests here.
    TorchModelDirectory(),
    # The oldest of the formats that one directory can have, as BERT's directory does: a directory, or an index file.
    TensorFlowCheckpoint(),
    VerlShards(),
    # Beside lit_model.pth, there can be the Hugging Face files that it was made from.
    LitGptModel(),
    OtherWeights(),
    # Single files. The first bytes count more than the suffix .safetensors.
    GgufFile(),
    NUMPY,
    LightningFile(),
    TorchFile(),
    ZIP,
    NemoFile(),
    QnemoFile(),
    TAR,
    PICKLE,
    HDF5,
    LFS_POINTER,
    SafetensorsFile(),
    UNKNOWN,
)


_RUN: Format = AutoModel()


def detect_run(path: Path) -> Format | None:
    """Return the format of the training state in *path*, or None when no format recognizes it.

    :func:`detect` returns the same format, except for a checkpoint with parts that have a format each. Such a
    checkpoint is shown as its parts, and its weights are the weights of one part.
    """
    return detect_parts(path) or detect(path, readable_only=True)


def detect_parts(path: Path) -> Format | None:
    """Return the format of a checkpoint with parts that have a format each, or None when *path* is not one."""
    return _RUN if _RUN.detect(path) else None


def detect(path: Path, *, readable_only: bool = False) -> Format | None:
    """Return the first format that recognizes the directory or file *path*, or None when there is none.

    With *readable_only*, formats that are only recognized are skipped. Raises OSError for a file that cannot be read.
    """
    for known in FORMATS:
        if (known.is_readable or not readable_only) and known.detect(path):
            return known
    return None


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
        if os.path.lexists(path / layout.MANIFEST):
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
