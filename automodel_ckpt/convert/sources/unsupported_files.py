"""Single files of other programs that are recognized by their first bytes, and not read. Imports no torch.

Nothing is unpickled or unpacked. A .safetensors file is a separate format (``safetensors_file.py``).
"""

from __future__ import annotations

from pathlib import Path

from automodel_ckpt.convert.sources.files import first_bytes
from automodel_ckpt.convert.sources.format import UnsupportedFormat
from automodel_ckpt.convert.tar_reading import is_gzip, is_tar

_HEAD_BYTES = 512
_SAVE_AGAIN = (
    "save it again in the format of PyTorch 1.6 and later, and use that file: "
    "python -c \"import torch; torch.save(torch.load('FILE', weights_only=True), 'FILE.pt')\""
)


class _FileByContent(UnsupportedFormat):
    """A file that is recognized by its first bytes. Raises OSError in :meth:`detect` if it cannot be read."""

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        return path.is_file() and self.matches(first_bytes(path, _HEAD_BYTES))

    def matches(self, head: bytes) -> bool:
        """Return whether a file that begins with *head* has this format."""
        raise NotImplementedError


class NumpyArchive(_FileByContent):
    name = "an archive of NumPy arrays"
    hint = "save its arrays with safetensors.numpy.save_file, and import that"

    def matches(self, head: bytes) -> bool:
        return _first_zip_entry(head).endswith((".npy", ".npz"))


class ZipArchive(_FileByContent):
    name = "a zip archive"
    hint = "unpack it, and import the directory of the model's files"

    def matches(self, head: bytes) -> bool:
        return _is_zip(head)


class TarArchive(_FileByContent):
    """An archive that is neither a model of NeMo nor of TensorRT-LLM, or too damaged to recognize one."""

    name = "a tar or gzip archive"
    hint = (
        "unpack it (tar), and use the directory; a .nemo file contains model_config.yaml: if this is one, take it "
        "from another copy"
    )

    def matches(self, head: bytes) -> bool:
        return is_gzip(head) or is_tar(head)


class Pickle(_FileByContent):
    name = "a pickle, such as torch.save wrote before PyTorch 1.6"
    hint = _SAVE_AGAIN

    def matches(self, head: bytes) -> bool:
        # The opcode PROTO and a protocol number. torch.save writes protocol 2.
        return head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class Hdf5File(_FileByContent):
    name = "HDF5, as Keras writes"
    hint = "load it with the program that wrote it, and save it as safetensors"

    def matches(self, head: bytes) -> bool:
        return head[:8] == b"\x89HDF\r\n\x1a\n"


class LfsPointer(_FileByContent):
    """What a clone of a repository has in the place of a large file if Git LFS is not installed."""

    name = "a pointer of Git LFS in the place of the file"
    hint = "download the file itself: git lfs pull, or hf download"

    def matches(self, head: bytes) -> bool:
        return head.startswith(b"version https://git-lfs.github.com/")


class UnknownFile(_FileByContent):
    """Any other file. Register it last."""

    name = "unknown"
    hint = "use a directory of *.safetensors or of PyTorch DCP, or a .safetensors file"

    def matches(self, head: bytes) -> bool:
        return True


def _is_zip(head: bytes) -> bool:
    return head[:4] == b"PK\x03\x04"


def _first_zip_entry(head: bytes) -> str:
    """Return the name of a zip archive's first entry (source: the format's local file header), or an empty string."""
    if not _is_zip(head):
        return ""
    length = int.from_bytes(head[26:28], "little")
    return head[30 : 30 + length].decode(errors="replace")
