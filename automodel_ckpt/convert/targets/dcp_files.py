"""Write a directory that PyTorch's ``dcp.load`` reads: ``__0_0.distcp`` and ``.metadata``, streamed. Imports no torch.

Each item of a ``.distcp`` file is an archive of ``torch.save``. ``.metadata`` describes the items: ``dcp_metadata.py``.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.pickles.dcp_metadata import (
    DcpChunk,
    DcpLocation,
    DcpMetadata,
    KeyPath,
)
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import (
    ArchiveTensor,
    write_torch_archive,
)

_FILE = "__0_0.distcp"


class DcpWriter:
    """Writes the items of a state dict to *directory*, which exists, and then ``.metadata``.

    A context manager: :meth:`finish` must be called at the end of the block, else ``.metadata`` is missing and the
    directory is not a checkpoint. Every method can raise OSError.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = (directory / _FILE).open("wb")
        self._metadata = DcpMetadata()

    def __enter__(self) -> DcpWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def add_tensor(self, path: KeyPath, tensor: ArchiveTensor) -> None:
        """Write a tensor as one chunk. *path* are its keys, and positions in lists, in the state dict of ``dcp.load``.

        Raises ValueError if another item has the same name.
        """
        self._metadata.check_is_new(path)
        zeros = (0,) * len(tensor.shape)
        chunk = DcpChunk(zeros, tensor.shape, self._written(tensor))
        self._metadata.add_tensor(path, tensor.dtype, tensor.shape, [chunk])

    def add_value(self, path: KeyPath, value: Any) -> None:
        """Write a value that is not a tensor: plain data, which ``torch.load(weights_only=True)`` reads.

        Raises ValueError if another item has the same name.
        """
        self._metadata.check_is_new(path)
        self._metadata.add_value(path, self._written(value))

    def finish(self) -> None:
        """Write ``.metadata``."""
        (self._directory / layout.DCP_METADATA).write_bytes(self._metadata.to_bytes())

    def _written(self, content: Any) -> DcpLocation:
        start = self._file.tell()
        write_torch_archive(self._file, content)
        return DcpLocation(_FILE, start, self._file.tell() - start)
