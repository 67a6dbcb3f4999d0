"""Files of other programs that are recognized, and not read. Imports no torch.

Single files are recognized by their first bytes, directories by names of files. Nothing is unpickled or unpacked. A
.safetensors file is a separate format (``hugging_face.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from automodel_ckpt.base.other_weights import (
    TORCH_SCRIPT,
    is_torch_script,
    kind_of_file,
    weights_of_another_program,
)
from automodel_ckpt.convert.formats.files import first_bytes
from automodel_ckpt.convert.formats.format import UnsupportedFormat
from automodel_ckpt.errors import unusable

_HEAD_BYTES = 512


class UnsupportedFile(UnsupportedFormat):
    """A kind of file that its first bytes in ``registry.py`` identify."""

    def __init__(self, name: str, hint: str) -> None:
        self.name = name  # type: ignore[misc]
        self.hint = hint  # type: ignore[misc]


class NumpyArchive(UnsupportedFormat):
    """A zip archive of NumPy arrays."""

    name = "an archive of NumPy arrays"
    hint = "save its arrays with safetensors.numpy.save_file, and import that"

    def detect(self, path: Path) -> bool:
        return first_zip_entry(first_bytes(path, _HEAD_BYTES)).endswith((".npy", ".npz"))


def first_zip_entry(head: bytes) -> str:
    """Return the name of a zip archive's first entry (source: the format's local file header), or an empty string."""
    if head[:4] != b"PK\x03\x04":
        return ""
    return head[30 : 30 + int.from_bytes(head[26:28], "little")].decode(errors="replace")


ZIP = UnsupportedFile("a zip archive", "unpack it, and import the directory of the model's files")
# An archive that is neither a model of NeMo nor of TensorRT-LLM, or too damaged to recognize one.
TAR = UnsupportedFile(
    "a tar or gzip archive",
    "unpack it (tar), and use the directory; a .nemo file contains model_config.yaml: if this is one, take it "
    "from another copy",
)
PICKLE = UnsupportedFile(
    "a pickle, such as torch.save wrote before PyTorch 1.6",
    "save it again in the format of PyTorch 1.6 and later, and use that file: "
    "python -c \"import torch; torch.save(torch.load('FILE', weights_only=True), 'FILE.pt')\"",
)
HDF5 = UnsupportedFile(
    "HDF5, as Keras writes",
    "load it with the program that wrote it, and save it as safetensors",
)
# What a clone of a repository has in the place of a large file if Git LFS is not installed.
LFS_POINTER = UnsupportedFile(
    "a pointer of Git LFS in the place of the file",
    "download the file itself: git lfs pull, or hf download",
)
UNKNOWN = UnsupportedFile(
    "unknown",
    "use a directory of *.safetensors or of PyTorch DCP, or a .safetensors file",
)


class VerlShards(UnsupportedFormat):
    """A directory of verl's checkpoints with FSDP, or the file of one of its ranks, which has a part of each tensor."""

    name = "a checkpoint of verl, a file for each rank"
    hint = (
        "merge the ranks: python -m verl.model_merger merge --backend fsdp --local_dir DIRECTORY --target_dir MERGED; "
        "MERGED has Hugging Face files"
    )


class OtherWeights(UnsupportedFormat):
    """A directory, or a file, with weights that only another program reads, such as Flax, Keras or Orbax."""

    name = "weights of another program"

    def detect(self, path: Path) -> bool:
        return _other_weights(path) is not None

    def open(self, path: Path) -> NoReturn:
        name, hint = _other_weights(path) or ("", "")
        raise unusable(f"this format cannot be read: {name}", path, path.name, hint)

    def describe(self, path: Path) -> str:
        found = _other_weights(path)
        return self.name if found is None else found[0]


def _other_weights(path: Path) -> tuple[str, str] | None:
    if path.is_dir():
        return weights_of_another_program(path)
    if is_torch_script(path):
        return TORCH_SCRIPT
    return kind_of_file(path.name)


class LitGptModel(UnsupportedFormat):
    """A directory of LitGPT's without the files that it was converted from."""

    name = "a model of LitGPT"
    hint = (
        "convert it: litgpt convert_from_litgpt DIRECTORY CONVERTED; then name CONVERTED/model.pth, and DIRECTORY "
        "with --config"
    )

    def detect(self, path: Path) -> bool:
        return path.is_dir()
