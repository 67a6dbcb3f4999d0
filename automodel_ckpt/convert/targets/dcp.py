"""A checkpoint's model as a plain directory of PyTorch DCP: verified, streamed, staged, published. Imports no torch.

``torch.distributed.checkpoint.load(state_dict, checkpoint_id=DIR)`` fills a state dict from it, sharded in any way. The
items of ``__0_0.distcp`` are archives of ``torch.save``, and ``.metadata`` describes them: ``dcp_metadata.py``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.pickles.dcp_metadata import (
    DcpLocation,
    DcpMetadata,
    KeyPath,
)
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import (
    ArchiveTensor,
    write_torch_archive,
)
from automodel_ckpt.convert.names.conversion import required_conversion
from automodel_ckpt.convert.names.torchtitan import to_torchtitan, torchtitan_conversion
from automodel_ckpt.convert.targets.flow import Export, ExportReport
from automodel_ckpt.convert.targets.torch_file import state_dict_of

DATA_FILE = "__0_0.distcp"


def write(export: Export, *, prefix: str | None = None, names: str | None = None) -> ExportReport:
    """Write the model as a DCP directory.

    *prefix* is added to all names: with ``model.``, ``dcp.load({"model": model.state_dict()}, ...)`` finds them. With
    *names* ``torchtitan``, a Llama has the names, and the rows of queries and keys the order, of torchtitan's Llama 3.
    Memory: one block of a tensor.
    """
    opened = export.source
    export.directory("-dcp")
    export.check()
    if names is not None:
        # Its digests are compared first: parts of its slices have none.
        export.check(reads_parts=True)
        side = opened.config_directory
        conversion = required_conversion(torchtitan_conversion(side), side)
        tensors = to_torchtitan(conversion, opened.tensors, export.where)
        opened = replace(opened, tensors=tensors, tied={})
    state_dict = state_dict_of(export, opened, "")
    outer = tuple(part for part in (prefix or "").split(".") if part)
    with export.published_directory() as directory, open(directory / DATA_FILE, "wb") as file:
        writer = DcpWriter(file)
        for fqn, tensor in state_dict.items():
            writer.add_tensor((*outer, fqn), tensor)
        writer.finish(directory)
    return export.report(len(state_dict))


class DcpWriter:
    """Writes the items of a state dict to *file*, which is :data:`DATA_FILE` of a directory, and then ``.metadata``.

    :meth:`finish` must be called at the end, else ``.metadata`` is missing and the directory is not a checkpoint. Every
    method can raise OSError.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._metadata = DcpMetadata()

    def add_tensor(self, path: KeyPath, tensor: ArchiveTensor) -> None:
        """Write a tensor as one chunk. *path* are its keys, and positions in lists, in the state dict of ``dcp.load``.

        Raises ValueError if another item has the same name.
        """
        self._metadata.add_tensor(path, tensor.dtype, tensor.shape, self._written(tensor))

    def add_value(self, path: KeyPath, value: Any) -> None:
        """Write a value that is not a tensor: plain data, which ``torch.load(weights_only=True)`` reads.

        Raises ValueError if another item has the same name.
        """
        self._metadata.add_value(path, self._written(value))

    def finish(self, directory: Path) -> None:
        """Write ``.metadata`` to *directory*."""
        (directory / layout.DCP_METADATA).write_bytes(self._metadata.to_bytes())

    def _written(self, content: Any) -> DcpLocation:
        start = self._file.tell()
        write_torch_archive(self._file, content)
        return DcpLocation(DATA_FILE, start, self._file.tell() - start)
